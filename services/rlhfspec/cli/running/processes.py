"""`rlhfspec run --processes`: every stage's worker in a process of its own, and this one their supervisor.

The same job and the same folder as in one process (`local`), and the same curve. Beside the folder's own files
`processes/` holds, while the run lasts, what its processes need to find each other; `logs/` stays.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rlhfspec.cli.running.given_options import GivenServers
from rlhfspec.cli.running.job_run import JobRun, Models, Say
from rlhfspec.common import ranks
from rlhfspec.common.awake_clock import AwakeClock
from rlhfspec.common.gpus import visible
from rlhfspec.errors import DataExhausted, StageError
from rlhfspec.job import RLHFJob
from rlhfspec.job.file.memory import weights_bytes
from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.access.rights import BUS_ROLES, CONTROL, rights_of
from rlhfspec.messages.loop import MOST_PENDING, workers_of
from rlhfspec.messages.records import DatasetInfo, WorkerInfo
from rlhfspec.messages.servers.credentials.certificates import ServerTls, create_credentials
from rlhfspec.messages.servers.guardian import MARK, NOTHING_STARTS, UID, Guardians, end_run
from rlhfspec.messages.servers.nats import NatsServer, User
from rlhfspec.messages.servers.program import ServerProgram, write_secret
from rlhfspec.messages.servers.redis import RedisServer
from rlhfspec.messages.servers.room import SERVERS_BYTES, place_of_weights, refuse_full_disk
from rlhfspec.messages.servers.scratch import Scratch
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.messages.wire.codec import decode
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.live.live import LiveBeats, LiveState
from rlhfspec.runs.live.run_state import KnownRun
from rlhfspec.runs.view.view import View
from rlhfspec.runs.view.watch import WatchService
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.context import kept_versions
from rlhfspec.stage.dead_letters import DeadLetterWatch
from rlhfspec.stage.supervisor import GRACE_SECONDS, STALL_SECONDS, Supervisor
from rlhfspec.stage.vitals import Vitals
from rlhfspec.supervisor import forgetting
from rlhfspec.supervisor.child import Child, Interpreters, Starter
from rlhfspec.supervisor.children import Children
from rlhfspec.supervisor.given_nats import check_nats, try_out
from rlhfspec.supervisor.given_redis import check_redis
from rlhfspec.supervisor.given_watch import GivenNatsWatch
from rlhfspec.supervisor.gpus import Dealt, deal
from rlhfspec.supervisor.launcher import Launcher
from rlhfspec.supervisor.server_watch import ServerWatch
from rlhfspec.telemetry.meters import Meters
from rlhfspec.telemetry.prometheus import served

DATASET_SECONDS = 5.0  # for what the server has to arrive


async def _while_running(service: Service, work: Awaitable[None]) -> None:
    """Until the work is done; what either raises ends both."""
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


class ProcessRun(JobRun):
    def __init__(
        self,
        written: RLHFJob,
        job: RLHFJob,
        base_folder: Path,
        folder: RunFolder,
        view: View,
        *,
        resume: bool,
        given: GivenServers,
    ) -> None:
        super().__init__(written, job, base_folder, folder, view, resume=resume)
        self._uid = secrets.token_hex(4)
        self._given = given
        self._vitals = Vitals(AwakeClock())
        self._known = KnownRun(self._vitals.clock)
        self._place = folder.processes.absolute()
        self._children: list[Child] = []
        self._gpus: Dealt = {}
        self._starter: Starter  # of its workers
        self._servers: list[ServerProgram] = []
        self._scratch = Scratch(self._uid, self._place)
        self._guardians = Guardians(
            self._uid,
            remove=[self._place, self._scratch.beginning, *self._scratch.paths],
            first=forgetting.command_for(self._scratch.paths) if given else (),
        )
        self._transport: NatsTransport
        self._processes: Children
        self._closing = AsyncExitStack()
        self._meters = Meters()
        self._is_complete = False
        self._failure: StageError | None = None

    # --- before the first step -----------------------------------------------------------------------------------

    def build(self, say: Say) -> None:
        self._gpus = deal(self._job, visible(os.environ))
        if self._given:
            say(f"looking at {self._given}")
            self.runner.run(self._check_given())
        before = self._uid_before()
        self._begin_folder({}, workers_of(self._job))  # the trainer's process writes in it as soon as it runs
        with ExitStack() as failing:
            failing.callback(self.leave_no_trace)
            try:
                self._make_room(say)
                if before:
                    self.runner.run(self._forget(before))
                self.runner.run(self._build(say))
            except StageError as error:  # some worked already, while others were still loading: the run has begun
                self._failure = error
            failing.pop_all()

    def _make_room(self, say: Say) -> None:
        refuse_full_disk(self.folder.path, SERVERS_BYTES, "the run's servers")
        self._leaving.callback(self._remove_all)
        self._guardians.start()
        self._scratch.make()
        needed = weights_bytes(self._job, self._base_folder, num_versions=kept_versions(self._job) + 1)
        self._weights_folder, told = place_of_weights(self._scratch.path, self._place, needed)
        if told:
            say(told)

    async def _build(self, say: Say) -> None:
        say("starting the servers")
        connections = await self._start_servers()
        self._starter = self._make_starter()
        await self._starter.begin()  # what it imports is there when the workers are to be started
        await _while_running(self._watch_servers(say, until=asyncio.Event()), self._connect(connections))
        workers = workers_of(self._job)
        self._children = [self._child(stage, worker) for stage, count in workers.items() for worker in range(count)]
        self._processes = self._children_service(say)
        self._closing.push_async_callback(self._processes.end)
        self._count()
        self._server_watch = self._watch_servers(
            lambda line: self._processes.say(line), until=self._processes.gone, given=self._given_watch()
        )
        say(f"starting {len(self._children)} processes")
        await _while_running(self._server_watch, self._processes.start())

    async def _connect(self, connections: Connections) -> None:
        if self._given.nats is not None:
            await try_out(self._given.nats, connections)
        self._closing.push_async_callback(self._forget, self._uid)
        assert connections.credentials is not None
        assert connections.redis_url is not None
        self._live = LiveState(connections.redis_url, self._uid, role=CONTROL, credentials=connections.credentials)
        self._transport = await connect(
            connections, CONTROL, name="supervisor", clock=self._vitals.clock, max_pending=MOST_PENDING
        )
        self._closing.push_async_callback(self._transport.close)
        self._bus = await Bus.open(
            self._transport,
            self._job.metadata.name,
            uid=self._uid,
            workers=workers_of(self._job) | {"view": 1},
            clock=self._vitals.clock,
        )
        self._watch = WatchService(self._vitals, self._bus.of("view"), view=self._view, known=self._known)
        await self._watch.listen()
        beats = LiveBeats(self._live, self._vitals, self._known, self._watch.recent)
        self._closing.push_async_callback(_ended, beats, asyncio.create_task(beats.run()))

    def _watch_servers(self, say: Say, *, until: asyncio.Event, given: GivenNatsWatch | None = None) -> ServerWatch:
        return ServerWatch(
            self._vitals,
            self._servers,
            self._guardians,
            self._starter,
            self._job.spec.failure_policy,
            say,
            until=until,
            given=given,
        )

    def _count(self) -> None:
        """What only the supervisor knows, for /metrics."""
        self._meters.reconnects("nats", lambda: self._transport.num_reconnects)
        self._meters.reconnects("redis", lambda: self._live.num_reconnects)
        for child in self._children:
            count = partial(self._processes.num_restarts, child.stage, child.worker)
            self._meters.restarts(child.stage, child.worker, count)

    async def _start_servers(self) -> Connections:
        credentials = self._credentials
        keys = create_credentials(credentials, BUS_ROLES)
        if self._given:
            self._given.keep(credentials)
            forgetting.note(credentials, self._job.metadata.name, self._uid)
        nats = self._given.nats or self._own_nats(keys)
        redis = self._given.redis or self._own_redis()
        self._servers = [server for server in (nats, redis) if isinstance(server, ServerProgram)]
        for server in self._servers:
            server.log = self.folder.logs.absolute() / f"{server.name}.log"
            server.log.parent.mkdir(exist_ok=True)
            self._closing.push_async_callback(server.stop)
            await server.start()
        write_secret(self._place / "job.json", self._job.model_dump_json(by_alias=True).encode())
        connections = Connections(
            uid=self._uid,
            job_file=self._place / "job.json",
            base_folder=self._base_folder,
            folder=self.folder.path.absolute(),
            nats_url=nats.url,
            redis_url=redis.url,
            credentials=credentials,
            weights_folder=self._weights_folder,
            activity_folder=self._activity_folder,
            supervisor_address=self._closing.enter_context(served(self._meters.metrics)),
        )
        write_secret(self._connections_file, connections.model_dump_json(indent=2).encode())
        return connections

    @property
    def _credentials(self) -> Path:
        """Those of the user's own servers are in memory alone."""
        return (self._scratch.path if self._given else self._place) / forgetting.CREDENTIALS_FOLDER

    def _own_nats(self, keys: Mapping[str, str]) -> NatsServer:
        name = self._job.metadata.name
        users = {role: User.of(key, rights_of(role, name, self._uid, declares=True)) for role, key in keys.items()}
        tls = ServerTls.of(self._credentials, "nats")
        return NatsServer(self._place / "nats", run=self._uid, users=users, tls=tls)

    def _own_redis(self) -> RedisServer:
        return RedisServer(
            self._place / "redis",
            run=self._uid,
            socket_folder=self._scratch.path,
            password_file=self._credentials / "redis.password",
        )

    @property
    def _connections_file(self) -> Path:
        return self._place / "connections.json"

    @property
    def _activity_folder(self) -> Path:
        return self._scratch.path / "activity"

    def _child(self, stage: str, worker: int) -> Child:
        arguments = ["-m", f"rlhfspec.{stage}", "--connections", str(self._connections_file), "--worker", str(worker)]
        if (threads := self._threads_of(stage)) is not None:
            arguments += ["--threads", str(threads)]
        gpus = self._gpus.get((stage, worker))
        dealt = [] if gpus is None else ["--gpus", ",".join(gpus)]
        trainer = self._job.spec.roles.trainer
        if stage == "trainer" and trainer.ranks > 1:
            arguments = [*ranks.set_of_ranks(trainer.ranks_per_node, nodes=trainer.nodes), *dealt, *arguments]
        else:
            arguments += dealt
        log = self.folder.logs.absolute() / f"{stage}-{worker}.jsonl"
        activity = self._activity_folder / f"{stage}-{worker}"
        return Child(stage, worker, arguments, self._starter, log, activity)

    def _make_starter(self) -> Starter:
        inherited = {name: value for name, value in os.environ.items() if name not in ranks.VARIABLES}
        environment = inherited | {MARK: self._uid}
        if sys.platform != "linux":
            return Interpreters(environment, self.folder.lock)
        launcher = Launcher(environment, self.folder.logs.absolute() / "launcher.log", self.folder.lock)
        self._closing.push_async_callback(launcher.close)
        return launcher

    def _threads_of(self, stage: str) -> int | None:
        """Several generators share the cores. All others compute with as many threads as in one process: the bits of
        the trainer's sums may depend on it."""
        count = workers_of(self._job)["generator"] * self._job.spec.num_processes("generator")
        if stage != "generator" or count == 1:
            return None
        share = max(1, len(os.sched_getaffinity(0)) // count)
        told = os.environ.get("OMP_NUM_THREADS", "")
        return min(share, int(told)) if told.isdecimal() else share

    def _children_service(self, say: Say) -> Children:
        return Children(
            self._bus,
            self._vitals,
            self._children,
            job=self._job,
            stall_seconds=STALL_SECONDS,
            is_done=self._is_done,
            known=self._known,
            show=self._view.processes,
            say=say,
        )

    def begin(self) -> None:
        models: Models = {}
        for info in self._known.run.infos:
            models |= {role: asdict(report) for role, report in info.models.items()}
        self.folder.loaded(models)
        self._processes.say = self.say

    # --- servers of the user's -----------------------------------------------------------------------------------

    def _uid_before(self) -> str:
        """A run in this folder that died with its machine: with its credentials lost, no other process can clean up."""
        with suppress(OSError):
            return (self._place / UID).read_text()
        return ""

    async def _check_given(self) -> None:
        if self._given.nats is not None:
            await check_nats(self._given.nats, self._job.spec.max_context)
        if self._given.redis is not None:
            await check_redis(self._given.redis, self._uid)

    async def _forget(self, uid: str) -> None:
        left = await forgetting.forget(self._given.nats, self._given.redis, self._job.metadata.name, uid)
        if left:
            self.say(left)

    def _given_watch(self) -> GivenNatsWatch | None:
        if self._given.nats is None:
            return None
        return GivenNatsWatch(
            self._transport,
            self._given.nats.url,
            self._bus.subject(WorkerInfo),
            self._vitals.clock,
            lambda line: self._processes.say(line),
        )

    # --- the run -------------------------------------------------------------------------------------------------

    async def stages(self) -> None:
        if self._failure is not None:
            raise self._failure
        services = [
            self._processes,
            self._watch,
            DeadLetterWatch(self._bus, self._vitals),
            self._server_watch,
        ]
        supervisor = Supervisor(
            self._vitals, stall_seconds=float("inf"), grace_seconds=2 * GRACE_SECONDS, final=(self._processes.stage,)
        )
        with self._view:
            await supervisor.run(services, self.stop)
        if await self._is_done() and (ended := await self._data_ended()) is not None:
            raise ended

    @property
    def is_unfinished(self) -> bool:
        return not self._is_complete

    async def _is_done(self) -> bool:
        """Every step is trained that there are prompts for."""
        steps, ended = self.folder.steps(), await self._data_ended()
        last_step = ended.last_step if ended is not None else self._job.spec.training.steps
        self._is_complete = bool(steps) and steps[-1].step >= last_step
        return self._is_complete

    async def _data_ended(self) -> DataExhausted | None:
        """Where the data ends before the job's steps do."""
        watching = await self._transport.watch(self._bus.subject(DatasetInfo))
        try:
            for message in await watching.pull(1, DATASET_SECONDS):
                info = decode(message.data)
                assert isinstance(info, DatasetInfo)
                if info.last_step and info.last_step < self._job.spec.training.steps:
                    return DataExhausted(info.last_step, info.num_prompts, self._job.spec.dataset.epochs or 1)
        finally:
            await watching.close()
        return None

    # --- its end -------------------------------------------------------------------------------------------------

    def leave_no_trace(self) -> None:
        for child in self._children:
            child.abandon()
        super().leave_no_trace()

    def _remove_all(self) -> None:
        """No process, no port, no shared memory; whatever fails on the way."""
        with ExitStack() as leaving:
            leaving.callback(self._guardians.release)
            leaving.callback(self._scratch.remove)
            leaving.callback(end_run, self._uid, [self._place], quiet_seconds=NOTHING_STARTS)
            self.runner.run(self._closing.aclose())
