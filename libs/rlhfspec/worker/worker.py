"""A stage's worker within its own process: connects, builds, says that it is there, runs, and leaves when asked to."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import signal
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from rlhfspec.common.awake_clock import AwakeClock
from rlhfspec.errors import InvalidRequest, TransportUnavailable
from rlhfspec.job import RLHFJob
from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.loop import workers_of
from rlhfspec.messages.records import WorkerInfo
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.context import Context, Run
from rlhfspec.stage.supervisor import GRACE_SECONDS, Supervisor
from rlhfspec.stage.threads import ComputeThread
from rlhfspec.stage.vitals import Vitals, WorkerVitals
from rlhfspec.telemetry.opening import watching
from rlhfspec.worker import exits
from rlhfspec.worker.activity import ActivityFile
from rlhfspec.worker.health import BEAT_SECONDS, LOOPBACK, Health
from rlhfspec.worker.heartbeats import Heartbeats
from rlhfspec.worker.hosting import with_guest
from rlhfspec.worker.last_words import leaves_at_once
from rlhfspec.worker.mirror import Mirror, Mirroring
from rlhfspec.worker.worker_weights import WorkerWeights

if TYPE_CHECKING:
    from rlhfspec.worker.ends import MoveEndpoint

_HOST = "RLHFSPEC_HOST"  # in the environment: the address to listen at, and where the other workers find this one
LEAVING_SECONDS = 15.0  # for a server that is away, where this worker was asked to leave: it may be gone for good
OPENING_SECONDS = 300.0  # for `control`, or the supervisor, to open the run
log = logging.getLogger("rlhfspec.stage")


class StageWorker:
    """`run` returns when its work is done, or when it was asked to leave; it raises when it cannot go on."""

    def __init__(
        self, stage: str, worker: int, connections: Connections, job: RLHFJob, mirror: Mirror | None = None
    ) -> None:
        self._stage = stage
        self._worker = worker
        self._connections = connections
        self._job = job
        self._mirror = mirror
        self._vitals = Vitals(AwakeClock())
        if connections.activity_folder is not None:
            self._vitals.note = ActivityFile(connections.activity_folder / f"{stage}-{worker}")
        self._stop = asyncio.Event()
        self._is_built = False
        self._incarnation = incarnation_of(stage, worker)
        self._transports: list[NatsTransport] = []
        self._host = host_told(os.environ)

    def run(self) -> str:
        """How far it came."""
        return asyncio.run(self._main())

    async def _main(self) -> str:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._asked_to_leave)
        connections, observability = self._connections, self._job.spec.observability
        traced = connections.folder if observability.traces else None
        endpoint = connections.otlp_endpoint or observability.otlp_endpoint
        with ExitStack() as leaving:
            watched = leaving.enter_context(
                watching(self._job.metadata.name, connections.uid, run=traced, otlp_endpoint=endpoint, metrics=True)
            )
            self._health = health = Health(
                self._stage, self._worker, self._vitals, connections.credentials, metrics=watched.metrics_text,
                host=self._host, http_port=connections.http_port, grpc_port=connections.grpc_port,
            )  # fmt: skip
            self._watched = watched
            assert watched.meters is not None
            self._meters = watched.meters
            self._meters.reconnects("nats", lambda: sum(each.num_reconnects for each in self._transports))
            self._vitals.told = self._meters.worked
            try:
                bus = await self._connect(self._stage, self._worker)
                weights = WorkerWeights(connections, self._job, bus.of(self._stage, self._worker), health)
                weights.told = partial(watched.meters.took_weights, self._stage, self._worker)
                leaving.enter_context(health)
                beating = asyncio.create_task(_beat(health))
                leaving.callback(beating.cancel)
                await self._until_open(bus)
                async with weights:
                    move_endpoint = self._move_endpoint()
                    if move_endpoint is not None:
                        leaving.callback(move_endpoint.close)
                    return await self._work(bus, health, weights, move_endpoint, leaving)
            finally:
                for transport in self._transports:
                    await transport.close()

    def _asked_to_leave(self) -> None:
        """While it loads there is nothing to hand back."""
        if self._stop.is_set() or not self._is_built:
            leaves_at_once("at once" if self._is_built else "before it had begun")
            os._exit(exits.DONE)
        self._stop.set()
        self._health.draining()
        for transport in self._transports:
            transport.hurry(LEAVING_SECONDS)

    async def _connect(self, stage: str, worker: int) -> Bus:
        """With the rights of that stage. A worker started by hand may have a higher number than the job says."""
        transport = await connect(self._connections, stage, name=f"{stage}-{worker}", clock=self._vitals.clock)
        self._transports.append(transport)
        workers = workers_of(self._job)
        workers[stage] = max(workers[stage], worker + 1)
        name, uid = self._job.metadata.name, self._connections.uid
        bus = Bus(transport, name, uid=uid, workers=workers, clock=self._vitals.clock)
        bus.watcher = self._watched.watcher
        return bus

    async def _until_open(self, bus: Bus) -> None:
        """Wait for the run to be opened, which may start at the same time."""
        [transport] = self._transports
        waiting = self._vitals.worker(self._stage, self._worker).waiting("the run to be opened")
        with waiting:
            await transport.until_declared(bus.last_declared, OPENING_SECONDS)

    def _move_endpoint(self) -> MoveEndpoint | None:
        if self._stage != "generator":
            return None
        from rlhfspec.worker.ends import MoveEndpoint

        connections = self._connections
        return MoveEndpoint.between_processes(
            self._incarnation, self._stage, self._host, connections.credentials, port=connections.moves_port,
            link_port=connections.link_port, worker_host=connections.worker_host,
        )  # fmt: skip

    async def _work(
        self, bus: Bus, health: Health, weights: WorkerWeights, move_endpoint: MoveEndpoint | None, leaving: ExitStack
    ) -> str:
        service = await self._built(bus, weights, move_endpoint, leaving)
        self._is_built = True
        await bus.publish(self._info(service, health, move_endpoint))
        health.ready()
        supervisor = Supervisor(
            self._vitals, stall_seconds=float("inf"), grace_seconds=GRACE_SECONDS, final=(self._stage,)
        )
        await supervisor.run([service, *service.beside, Heartbeats(bus, self._vitals), *self._mirroring()], self._stop)
        return service.said_at_the_end

    def _mirroring(self) -> list[Service]:
        """The trainer sends when a checkpoint is there."""
        return [] if self._mirror is None or self._stage == "trainer" else [Mirroring(self._mirror)]

    async def _built(
        self, bus: Bus, weights: WorkerWeights, move_endpoint: MoveEndpoint | None, leaving: ExitStack
    ) -> Service:
        """In a thread, so that the event loop goes on. What is done meanwhile is no work of the stage's."""
        vitals = Vitals(self._vitals.clock)
        vitals.note = self._vitals.note
        deadline = getattr(self._job.spec.roles, self._stage).deadline_seconds
        beating = asyncio.create_task(Heartbeats(bus, vitals).run())
        thread = ComputeThread("build")
        try:
            with _Saying(vitals.worker(self._stage, self._worker), deadline) as say:
                return await thread.in_thread(self._build, bus, weights, move_endpoint, leaving, say)
        finally:
            thread.close()
            beating.cancel()

    def _build(
        self, bus: Bus, weights: WorkerWeights, move_endpoint: MoveEndpoint | None, leaving: ExitStack, say: _Saying
    ) -> Service:
        connections = self._connections
        context = Context(
            worker=self._worker,
            bus=bus.of(self._stage, self._worker),
            weights=weights,
            vitals=self._vitals,
            run=Run(
                uid=connections.uid,
                base_folder=connections.base_folder,
                folder=connections.folder,
                folder_is_kept_by=connections.folder_is_kept_by,
                mirror=self._mirror,
            ),
            say=say,
            move_endpoint=move_endpoint,
            at_end=leaving,
        )
        context = with_guest(self._job, context, self._connect)
        service: Service = import_module(f"rlhfspec.{self._stage}.build").build(self._job, context)
        return service

    def _info(self, service: Service, health: Health, move_endpoint: MoveEndpoint | None) -> WorkerInfo:
        return WorkerInfo(
            id=self._incarnation,
            job=self._job.metadata.name,
            stage=self._stage,
            worker=self._worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            grpc_address=health.grpc_address,
            http_address=health.http_address,
            moves_address=move_endpoint.address if move_endpoint else "",
            models=service.models,
        )


def host_told(environment: Mapping[str, str]) -> str:
    """
    >>> host_told({_HOST: "300.1.2.3"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    rlhfspec.errors.InvalidRequest: RLHFSPEC_HOST: in the environment, is no address of this machine: ...
    """
    host = environment.get(_HOST) or LOOPBACK
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
            listening.bind((host, 0))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise TransportUnavailable(host, "no port is free (net.ipv4.ip_local_port_range)") from None
        raise InvalidRequest(
            _HOST, host, f"in the environment, is no address of this machine: {error.strerror}"
        ) from None
    return host


def incarnation_of(stage: str, worker: int) -> str:
    """Another one with every start of a worker."""
    return f"{stage}/{worker}/{secrets.token_hex(8)}"


async def _beat(health: Health) -> None:
    while True:
        health.beat()
        await asyncio.sleep(BEAT_SECONDS / 10)


class _Saying:
    """What a builder says is what the worker does then, for those that watch; what is said later stands in its log, for
    the person who started the run."""

    def __init__(self, vitals: WorkerVitals, deadline_seconds: float) -> None:
        self._vitals = vitals
        self._deadline = deadline_seconds
        self._loading: ExitStack | None = None

    def __enter__(self) -> _Saying:
        self._loading = ExitStack()
        self("starting")
        return self

    def __exit__(self, *error: object) -> None:
        if self._loading is not None:
            self._loading.close()
            self._loading = None

    def __call__(self, text: str) -> None:
        log.info("%s", text, extra={"fields": {"said": self._loading is None}})
        if self._loading is not None:
            self._loading.close()
            self._loading.enter_context(self._vitals.working(text, deadline_seconds=self._deadline))
