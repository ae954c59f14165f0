"""Run with a process per worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rlhfspec.common import ranks
from rlhfspec.common.awake_clock import AwakeClock
from rlhfspec.common.gpus import visible
from rlhfspec.errors import DataExhausted, EndedEarly, PolicyCollapsed, StageError
from rlhfspec.job import RLHFJob
from rlhfspec.job.file.memory import weights_bytes
from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.access.rights import CONTROL
from rlhfspec.messages.loop import MOST_PENDING, workers_of
from rlhfspec.messages.records import DatasetInfo
from rlhfspec.messages.servers.guardian import MARK
from rlhfspec.messages.servers.room import place_of_weights
from rlhfspec.messages.wire.codec import decode
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.live.live import LiveBeats, LiveState
from rlhfspec.runs.live.run_state import KnownRun
from rlhfspec.runs.view.learning_signs import collapse_of
from rlhfspec.runs.view.view import View
from rlhfspec.runs.view.watch import WatchService
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.context import kept_versions
from rlhfspec.stage.dead_letters import DeadLetterWatch
from rlhfspec.stage.supervisor import GRACE_SECONDS, STALL_SECONDS, Supervisor
from rlhfspec.stage.vitals import Vitals
from rlhfspec.supervisor.children import Children
from rlhfspec.supervisor.commands import make_children
from rlhfspec.supervisor.gpus import Dealt, deal
from rlhfspec.supervisor.job_run import JobRun, Models, Say
from rlhfspec.supervisor.launcher import STAGES_NEED, Launcher
from rlhfspec.supervisor.place import ProcessPlace
from rlhfspec.supervisor.server_watch import ServerWatch
from rlhfspec.supervisor.servers import start_servers, write_connections
from rlhfspec.telemetry.meters import Meters
from rlhfspec.telemetry.prometheus import served
from rlhfspec.worker.health import LOOPBACK

_DATASET_SECONDS = 5.0  # for the dataset's info to arrive


class ProcessRun(JobRun):
    def __init__(self, job: RLHFJob, base_folder: Path, folder: RunFolder, view: View) -> None:
        super().__init__(job, base_folder, folder, view)
        self._place = ProcessPlace(folder)
        self._vitals = Vitals(AwakeClock())
        self._known = KnownRun(self._vitals.clock)
        self._closing = AsyncExitStack()
        self._is_complete = False
        self._processes: Children | None = None
        self._failure: StageError | None = None
        self._client_token = ""

    def build(self, say: Say) -> None:
        self._say = say
        if self.serve_port is not None:
            self._prepare_to_serve(self.serve_port)
        gpus = deal(self._job, visible(os.environ))
        try:
            self._leaving.callback(self._remove_all)
            self._place.make()
            self.runner.run(self._start(gpus))
        except StageError as error:  # the run has begun, as some workers may have trained already
            self._failure = error

    def _prepare_to_serve(self, port: int) -> None:
        """Choose port and token of the gateway, which are the same after its restart."""
        from rlhfspec.common.web import listen
        from rlhfspec.door.server import client_token

        with listen(LOOPBACK, port, option="--serve") as free:
            self.serve_port = free.getsockname()[1]
        self._client_token = client_token()

    async def _start(self, gpus: Dealt) -> None:
        weights_folder = self._weights_folder()
        self.say("starting the servers")
        servers = await start_servers(self._job, self._place, self._closing)
        meters = Meters()
        connections = write_connections(
            self._job,
            self._place,
            servers,
            base_folder=self._base_folder,
            weights_folder=weights_folder,
            supervisor_address=self._closing.enter_context(served(meters.metrics)),
            serve_port=self.serve_port,
            client_token=self._client_token,
        )
        launcher = self._make_launcher()
        await launcher.begin()  # imports while the broker is connected
        gone = asyncio.Event()
        self._server_watch = ServerWatch(
            self._vitals, servers, self._place.guardians, launcher, self._job.spec.failure_policy, self.say, until=gone
        )
        await _while_running(self._server_watch, self._connect(connections))
        children = make_children(self._job, self._place, gpus, launcher, is_served=self.serve_port is not None)
        self._processes = Children(
            self._bus,
            self._vitals,
            children,
            job=self._job,
            stall_seconds=STALL_SECONDS,
            is_done=self._is_done,
            known=self._known,
            say=self.say,
            gone=gone,
        )
        self._closing.push_async_callback(self._processes.end)
        for child in children:
            meters.restarts(child.stage, child.worker, partial(self._processes.num_restarts, child.stage, child.worker))
        meters.reconnects("nats", lambda: self._transport.num_reconnects)
        meters.reconnects("redis", lambda: self._live.num_reconnects)
        self.say(f"starting {len(children)} processes")
        await _while_running(self._server_watch, self._processes.start())

    def _weights_folder(self) -> Path:
        needed = weights_bytes(self._job, self._base_folder, num_versions=kept_versions(self._job) + 1)
        folder, told = place_of_weights(self._place.memory, self._place.path, needed)
        if told:
            self.say(told)
        return folder

    def _make_launcher(self) -> Launcher:
        inherited = {name: value for name, value in os.environ.items() if name not in ranks.VARIABLES}
        environment = inherited | {MARK: self._place.uid}
        modules = STAGES_NEED if self.serve_port is None else (*STAGES_NEED, "rlhfspec.gateway.service")
        launcher = Launcher(environment, self._place.logs / "launcher.log", self.folder.lock, modules)
        self._closing.push_async_callback(launcher.close)
        return launcher

    async def _connect(self, connections: Connections) -> None:
        assert connections.redis_url is not None
        self._live = LiveState(connections.redis_url, self._place.uid, credentials=connections.credentials)
        self._transport = await connect(
            connections, CONTROL, name="supervisor", clock=self._vitals.clock, max_pending=MOST_PENDING
        )
        self._closing.push_async_callback(self._transport.close)
        self._bus = await Bus.open(
            self._transport,
            self._job.metadata.name,
            uid=self._place.uid,
            workers=workers_of(self._job, is_served=self.serve_port is not None) | {"view": 1},
            clock=self._vitals.clock,
        )
        self._watch = WatchService(self._vitals, self._bus.of("view"), view=self._view, known=self._known)
        await self._watch.listen()
        beats = LiveBeats(self._live, self._vitals, self._known, self._watch.recent)
        self._closing.push_async_callback(_ended, beats, asyncio.create_task(beats.run()))

    def begin(self) -> None:
        models: Models = {}
        for info in self._known.run.infos:
            models |= {role: asdict(report) for role, report in info.models.items()}
        self.folder.loaded(models)
        self._say = self._view.say
        if self.serve_port is not None:
            from rlhfspec.door.server import variables

            for line in variables(LOOPBACK, self.serve_port, self._client_token):
                self.say(line)

    async def stages(self) -> None:
        if self._failure is not None:
            raise self._failure
        assert self._processes is not None, "it was built"
        services = [self._processes, self._watch, DeadLetterWatch(self._bus, self._vitals), self._server_watch]
        supervisor = Supervisor(
            self._vitals, stall_seconds=float("inf"), grace_seconds=2 * GRACE_SECONDS, final=(self._processes.stage,)
        )
        with self._view:
            await supervisor.run(services, self.stop)
        if await self._is_done() and (ended := self._collapsed() or await self._data_ended()) is not None:
            raise ended

    @property
    def is_unfinished(self) -> bool:
        return not self._is_complete

    async def _is_done(self) -> bool:
        steps, ended = self.folder.steps(), await self._data_ended()
        last_step = ended.last_step if ended is not None else self._job.spec.training.steps
        self._is_complete = (bool(steps) and steps[-1].step >= last_step) or self._collapsed() is not None
        return self._is_complete

    def _collapsed(self) -> EndedEarly | None:
        sign = collapse_of(self.folder.evaluations()) if self._job.spec.training.stop_on_collapse else ""
        return PolicyCollapsed(sign) if sign else None

    async def _data_ended(self) -> DataExhausted | None:
        watching = await self._transport.watch(self._bus.subject(DatasetInfo))
        try:
            for message in await watching.pull(1, _DATASET_SECONDS):
                info = decode(message.data)
                assert isinstance(info, DatasetInfo)
                if info.last_step and info.last_step < self._job.spec.training.steps:
                    return DataExhausted(info.last_step, info.num_prompts, self._job.spec.dataset.epochs or 1)
        finally:
            await watching.close()
        return None

    def abandon(self) -> None:
        if self._processes is not None:
            self._processes.abandon()

    def _remove_all(self) -> None:
        with ExitStack() as leaving:
            leaving.callback(self._place.remove)
            self.runner.run(self._closing.aclose())


async def _while_running(service: Service, work: Awaitable[None]) -> None:
    """Run a service until the work is done; an exception in either ends both."""
    running, working = asyncio.create_task(service.run()), asyncio.ensure_future(work)
    try:
        await asyncio.wait([running, working], return_when=asyncio.FIRST_COMPLETED)
        await (working if working.done() else running)
    finally:
        running.cancel()
        working.cancel()
        await asyncio.gather(running, working, return_exceptions=True)


async def _ended(service: Service, running: asyncio.Task[None]) -> None:
    await service.stop()
    await running
