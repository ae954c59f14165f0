"""Control of one run: observes it, feeds the live view and reports to the operator."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from functools import partial
from pathlib import Path

from rich.console import Console

from rlhfspec.common.awake_clock import AwakeClock
from rlhfspec.control.knowledge import RunKnowledge, lines_of
from rlhfspec.control.looking import (
    FOLDER_SECONDS,
    STORE_SECONDS,
    BrokerWatch,
    Looking,
    last_checkpoint,
    steps_of,
    view_of,
)
from rlhfspec.control.reporting import Endpoint, Reporter
from rlhfspec.errors import TransportUnavailable
from rlhfspec.job import RLHFJob
from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.access.rights import CONTROL
from rlhfspec.messages.loop import MOST_PENDING, workers_of
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.live.live import MOST_STEPS, LiveBeats, LiveState, RecentLines
from rlhfspec.runs.view.watch import WatchService
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.logs import without_secrets
from rlhfspec.stage.supervisor import Supervisor
from rlhfspec.stage.tasks import together
from rlhfspec.stage.vitals import Vitals
from rlhfspec.telemetry.meters import Meters
from rlhfspec.telemetry.prometheus import text_of
from rlhfspec.worker.health import LOOPBACK, Health
from rlhfspec.worker.last_words import IN_A_POD
from rlhfspec.worker.mirror import Mirror

_BROKER_RETRY_SECONDS = 1.0
_POLL_OPEN_RUN_SECONDS = 0.2  # between two checks for an open run
OPENED_SECONDS = 15.0  # before the warning that the operator has not opened the run
_GRACE_SECONDS = 5.0
log = logging.getLogger("rlhfspec.stage")


class Control:
    """Control process of a run. `run` returns only on SIGTERM or SIGINT."""

    def __init__(self, connections: Connections, job: RLHFJob, token_file: Path, mirror: Mirror | None = None) -> None:
        self._connections, self._job, self._token_file = connections, job, token_file
        self._vitals = Vitals(AwakeClock())
        self._transport: NatsTransport | None = None
        self._meters = Meters()
        self._meters.reconnects("nats", lambda: self._transport.num_reconnects if self._transport is not None else 0)
        self._folder = RunFolder(connections.folder)
        self._last_checkpoint = mirror.last_checkpoint if mirror else partial(last_checkpoint, self._folder)
        self._folder_seconds = STORE_SECONDS if mirror else FOLDER_SECONDS
        self._recent = RecentLines()
        self._stop = asyncio.Event()
        broker = without_secrets(connections.nats_url)
        self._knowledge = RunKnowledge(job, connections.uid, broker, self._vitals.clock)

    def run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)
        steps = await asyncio.to_thread(steps_of, self._folder)
        self._knowledge.found(steps)
        for line in lines_of(steps[-MOST_STEPS:]):
            self._recent.step(line)
        connections = self._connections
        with Health(
            CONTROL, 0, self._vitals, connections.credentials, metrics=lambda: text_of(self._meters.metrics()),
            host=os.environ.get(IN_A_POD) or LOOPBACK, http_port=connections.http_port, grpc_port=connections.grpc_port,
        ) as health:  # fmt: skip
            beating = asyncio.create_task(health.keep_beating())
            services = [_LookingOn(self, health), *self._reporter(), *self._live()]
            supervisor = Supervisor(self._vitals, stall_seconds=float("inf"), grace_seconds=_GRACE_SECONDS, final=())
            try:
                await supervisor.run(services, self._stop)
            finally:
                beating.cancel()

    def _reporter(self) -> list[Service]:
        connections = self._connections
        if connections.report_url is None:
            return []
        assert connections.credentials is not None, "an address to report to comes with a CA"
        endpoint = Endpoint(connections.report_url, connections.credentials / "servers-ca.pem", self._token_file)
        draw = random.Random(f"{connections.uid}/{os.getpid()}")
        return [Reporter(self._vitals, self._knowledge.report, endpoint.post, draw)]

    def _live(self) -> list[Service]:
        connections = self._connections
        if connections.redis_url is None:
            return []
        state = LiveState(connections.redis_url, connections.uid, credentials=connections.credentials)
        self._meters.reconnects("redis", lambda: state.num_reconnects)
        return [LiveBeats(state, self._vitals, self._knowledge.known, self._recent)]

    # --- with the broker -----------------------------------------------------------------------------------------

    async def look_on(self, service: Service, health: Health) -> None:
        transport = await self._connected(service)
        if transport is None:
            return
        self._transport = transport
        try:
            await self._look_on(service, health, transport)
        finally:
            await transport.close()

    async def _look_on(self, service: Service, health: Health, transport: NatsTransport) -> None:
        name, uid, clock = self._job.metadata.name, self._connections.uid, self._vitals.clock
        bus = Bus(transport, name, uid=uid, workers=workers_of(self._job) | {"view": 1}, clock=clock)
        asking = BrokerWatch(self._vitals, transport, bus, self._knowledge)
        watch = WatchService(
            self._vitals, bus.of("view"), view=view_of(self._job, Console(quiet=True), shown=False),
            recent=self._recent, known=self._knowledge.known,
        )  # fmt: skip
        looking = Looking(
            self._vitals, bus, self._knowledge, self._last_checkpoint, folder_seconds=self._folder_seconds
        )

        async def open_and_look() -> None:
            if await self._until_open(service, transport, bus):
                health.ready()
                log.info("the run is open")
                supervisor = Supervisor(
                    self._vitals, stall_seconds=float("inf"), grace_seconds=_GRACE_SECONDS, final=()
                )
                await supervisor.run([looking, watch], service.stopping)
            await asking.stop()

        await together(asking.run(), open_and_look())

    async def _until_open(self, service: Service, transport: NatsTransport, bus: Bus) -> bool:
        """Wait until the operator has made the run's streams; return False if stopped first."""
        clock = self._vitals.clock
        tell_at = clock.now() + OPENED_SECONDS
        while not service.stopping.is_set():
            if await transport.is_declared(bus.last_declared):
                return True
            if clock.now() >= tell_at:
                log.warning("the operator has not created the run's streams in NATS yet; see its log")
                tell_at = float("inf")
            await service.pause("the operator to create the run's streams", _POLL_OPEN_RUN_SECONDS)
        return False

    async def _connected(self, service: Service) -> NatsTransport | None:
        """Connect, retrying without limit; return None if stopped first."""
        is_told = False
        while not service.stopping.is_set():
            try:
                return await connect(
                    self._connections, CONTROL, name="control", clock=self._vitals.clock, max_pending=MOST_PENDING
                )
            except TransportUnavailable as error:
                if not is_told:
                    log.warning("%s; retrying until it is reachable", error)
                is_told = True
            await service.pause("the broker", _BROKER_RETRY_SECONDS)
        return None


class _LookingOn(Service):
    """Run observers. consumes: all records; produces: nothing; waits for: the broker; unblocked by: every stage."""

    def __init__(self, control: Control, health: Health) -> None:
        super().__init__("opening", 0, control._vitals)
        self._control, self._health = control, health

    async def run(self) -> None:
        await self._control.look_on(self, self._health)
