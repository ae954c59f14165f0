"""Supervision of worker processes: start, watch, restart by failure policy, stop."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from rlhfspec.errors import RLHFSpecError, StageFailed, StageRefused
from rlhfspec.job import RLHFJob
from rlhfspec.messages import loop
from rlhfspec.messages.records import Heartbeat, StepReport, WorkerInfo
from rlhfspec.messages.servers.guardian import processes_of
from rlhfspec.runs.live.run_state import SILENT_SECONDS, HeldNews, KnownRun, ProcessNews, WorkerKey
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.supervisor import GRACE_SECONDS, STAGE_NAMES, is_overdue, raise_if_all_wait
from rlhfspec.stage.vitals import Vitals
from rlhfspec.supervisor.child import Child, Ended
from rlhfspec.supervisor.restarts import Restarts
from rlhfspec.worker import exits

log = logging.getLogger("rlhfspec.stage")
CHECK_SECONDS = 0.5
_GATEWAY_SECONDS = 60.0  # between restarts of a gateway that keeps failing; clients never end a run
_OVERDUE_SECONDS = 5.0  # past the deadline at which a worker ends itself
_FINISHED_GRACE_SECONDS = 15.0  # to leave a run whose last step is trained
Say = Callable[[str], None]


class Children(Service):
    """Supervisor of worker processes. `run` returns when all have left, or after `stop`."""

    def __init__(
        self,
        bus: Bus,
        vitals: Vitals,
        children: Sequence[Child],
        *,
        job: RLHFJob,
        stall_seconds: float,
        is_done: Callable[[], Awaitable[bool]],
        known: KnownRun,
        say: Say,
        gone: asyncio.Event | None = None,
    ) -> None:
        super().__init__("processes", 0, vitals)
        self.known = known
        self._bus = bus
        self._children = {(child.stage, child.worker): child for child in children}
        self._job = job
        self._stall_seconds = stall_seconds
        self._is_done = is_done
        self._say = say
        self._restarts = {
            key: Restarts(job.spec.failure_policy, random.Random(f"{bus.uid} {key}")) for key in self._children
        }
        self._num_starts = dict.fromkeys(self._children, 0)
        self._last_step = 0
        self._ready = asyncio.Event()  # set once all were ready
        self._over = asyncio.Event()
        self._leaving = asyncio.Event()  # exits from now on are expected
        self._gone = gone or asyncio.Event()  # set once all processes ended
        self._keeping: dict[asyncio.Task[None], Child] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all workers and wait until each is ready or has left."""
        inboxes = [
            await self._bus.of("view").subscribe(WorkerInfo),
            await self._bus.of("view").subscribe(Heartbeat),
            await self._bus.of("view").subscribe(StepReport),
        ]
        for child in self._children.values():
            self._tell_of(child, "starting")
        self._keeping = {asyncio.create_task(self._keep(child)): child for child in self._children.values()}
        watching: list[Coroutine[Any, Any, None]] = [*(self._hear(inbox) for inbox in inboxes), self._look()]
        self._tasks = [*self._keeping, *(asyncio.create_task(part) for part in watching)]
        await self._until(self._ready)

    async def run(self) -> None:
        try:
            with self.vitals.waiting("the end of the run"):
                await self._until(self._over, self.stopping)
            await self._leave()
        finally:
            await self.end()

    async def end(self) -> None:
        self._leaving.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in self._children.values():
            if child.pid is not None:
                child.kill()
                await child.wait()
        self._gone.set()

    def abandon(self) -> None:
        """Kill every process and never restart one; callable from any thread."""
        for child in self._children.values():
            child.abandon()

    async def _until(self, *events: asyncio.Event) -> None:
        waits = [asyncio.create_task(event.wait()) for event in events]
        try:
            while not any(event.is_set() for event in events):
                pending = [task for task in self._tasks if not task.done()]
                await asyncio.wait([*waits, *pending], return_when=asyncio.FIRST_COMPLETED)
                for task in self._tasks:
                    if task.done():
                        task.result()
        finally:
            for wait in waits:
                wait.cancel()

    async def _keep(self, child: Child) -> None:
        while True:
            await child.start()
            self._num_starts[child.stage, child.worker] += 1
            self._tell_of(child, "starting")
            ended = await child.wait()
            if child.is_abandoned:
                return
            self._tell_news(child)
            if self._leaving.is_set():
                return self._left(child, ended)
            if child.stage == "trainer" and ended.failure is None and await self._is_done():
                self._left(child, ended)
                return self._over.set()
            if ended.failure is None and not self.known.run.is_only_worker((child.stage, child.worker)):
                self._say(f"{child.stage} {child.worker} left: another program stopped it")
                return self._left(child, ended)
            await self._before_restart(child, ended)
            if self._leaving.is_set():
                return

    def _left(self, child: Child, ended: Ended) -> None:
        self._tell_of(child, "left")
        self._look_who_is_awaited()
        if ended.failure not in (None, "killed"):
            raise StageFailed(child.stage, child.worker, ended.reason)

    async def _before_restart(self, child: Child, ended: Ended) -> None:
        stage, worker, restarts = child.stage, child.worker, self._restarts[child.stage, child.worker]
        if exits.is_about_full_disk(ended.reason):  # a restart frees no space
            raise StageFailed(stage, worker, ended.reason)
        delay = restarts.delay_after(ended.failure or "killed")
        if delay is None and stage == loop.GATEWAY.name:
            delay = _GATEWAY_SECONDS
        elif ended.failure == "permanent" and not self._is_ready((stage, worker)):
            raise StageRefused(ended.reason)
        if delay is None:
            many = (
                f"; {restarts.num_failures} failures since step {self._last_step}" if restarts.num_failures > 1 else ""
            )
            raise StageFailed(stage, worker, f"{ended.reason}{many}")
        self._say(f"{stage} {worker}: {ended.reason}; it is started again in {delay:.1f} s")
        self._tell_of(child, "restarting", ended.reason)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._leaving.wait(), delay)
        if not self._leaving.is_set() and self.known.run.is_only_worker((stage, worker)):
            await self._release(stage)

    async def _release(self, stage: str) -> None:
        """Redeliver the dead worker's messages at once, instead of after the ack wait."""
        try:
            await self._bus.release(stage)
        except RLHFSpecError as error:
            log.warning("records held by %s are redelivered only after %g s: %s", stage, loop.ACK_WAIT_SECONDS, error)

    async def _hear(self, inbox: Any) -> None:
        while True:
            for delivery in await inbox.pull(max_records=256, timeout_seconds=PULL_SECONDS):
                self._heard(delivery.record)

    def _heard(self, record: Heartbeat | WorkerInfo | StepReport) -> None:
        if isinstance(record, Heartbeat):
            worker = self.known.run.workers.get((record.stage, record.worker))
            if worker is not None and worker.process is not None:  # one started by hand sends its WorkerInfo first
                self.known.tell(record)
        elif isinstance(record, WorkerInfo):
            if record.stage in self._bus.workers and record.stage in STAGE_NAMES:
                self._joined(record)
        elif record.step > self._last_step:  # a repeated step is no progress
            self._last_step = record.step
            for restarts in self._restarts.values():
                restarts.forget()

    def _joined(self, info: WorkerInfo) -> None:
        if joined(self.known, info):
            self._say(f"{info.stage} {info.worker} joined (process {info.pid} on {info.host})")
        if not self._ready.is_set():
            num_ready = sum(map(self._is_ready, self._children))
            self._say(f"{info.stage} {info.worker} is ready ({num_ready} of {len(self._children)})")
        self._look_who_is_awaited()

    def _look_who_is_awaited(self) -> None:
        if all(self._is_ready(key) or self.known.run.workers[key].phase == "left" for key in self._children):
            self._ready.set()

    def num_restarts(self, stage: str, worker: int) -> int:
        return max(self._num_starts[stage, worker] - 1, 0)

    def _is_ready(self, key: WorkerKey) -> bool:
        return self.known.run.workers[key].info is not None

    def _tell_of(self, child: Child, phase: Literal["starting", "restarting", "left"], why: str = "") -> None:
        num_restarts = self.num_restarts(child.stage, child.worker)
        self.known.tell(
            ProcessNews(
                stage=child.stage, worker=child.worker, phase=phase, what=why, num_restarts=num_restarts,
                pid=child.pid if phase == "starting" else None,
            )
        )  # fmt: skip

    async def _look(self) -> None:
        while True:
            for child in self._children.values():
                self._tell_news(child)
                self._look_at(child)
            for name in gone(self.known):
                self._say(f"{name} left")
            run, now = self.known.run, self.known.clock.now()
            if self._ready.is_set() and run.all_run(now):
                raise_if_all_wait(run.states, run.quiet_seconds(now), self._stall_seconds)
            await self._bus.clock.sleep(CHECK_SECONDS)

    def _look_at(self, child: Child) -> None:
        stage, worker = child.stage, child.worker
        if child.pid is None:
            return
        known = self.known.run.workers[stage, worker]
        silence = self.known.clock.now() - known.spoke_at
        deadline = loop.deadline_of(self._job, stage)
        if child.is_held() != known.is_held:
            self.known.tell(HeldNews(stage=stage, worker=worker, is_held=child.is_held()))
        elif not known.is_held and (state := known.state) is not None and is_overdue(state, _OVERDUE_SECONDS):
            child.kill(f"stalled: {state.what} takes {state.since_seconds:.0f} s, longer than its deadline")
        if silence > max(deadline, SILENT_SECONDS) and not child.is_held():
            child.kill(f"stalled: no heartbeat for {silence:.0f} s")

    def _tell_news(self, child: Child) -> None:
        for line in child.news():
            self._say(line if child.stage == "trainer" else f"{child.stage} {child.worker}: {line}")

    def _ask_those_started_by_hand(self) -> None:
        """Ask this machine's hand-started workers to stop, because their servers end."""
        of_this_run = processes_of(self._bus.uid)  # a record may name any process
        for info in self.known.run.infos:
            if (info.stage, info.worker) not in self._children and info.pid in of_this_run:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(info.pid, signal.SIGTERM)

    async def _leave(self) -> None:
        """Ask all workers to stop, and kill those that exceed the grace."""
        self._leaving.set()
        grace = _FINISHED_GRACE_SECONDS if self._over.is_set() else GRACE_SECONDS
        for task, child in self._keeping.items():
            if child.pid is None:
                task.cancel()
            child.ask_to_leave()
        self._ask_those_started_by_hand()
        await asyncio.wait(self._keeping, timeout=grace)
        for task, child in self._keeping.items():
            if not task.done():
                log.warning("%s %d did not stop within %g s and is killed", child.stage, child.worker, grace)
                child.kill()
        await asyncio.wait(self._keeping)
        for task in self._keeping:
            if not task.cancelled():
                task.result()


def joined(known: KnownRun, info: WorkerInfo) -> bool:
    """Record a ready worker; return whether it is new and was started by hand."""
    worker = known.run.workers.get((info.stage, info.worker))
    is_new = worker is None or worker.process is None or (worker.is_by_hand and worker.phase == "left")
    if is_new:
        known.tell(ProcessNews(stage=info.stage, worker=info.worker, phase="starting", by_hand=True))
    known.tell(info)
    return is_new


def gone(known: KnownRun) -> list[str]:
    """Return, once each, the names of hand-started workers that left or are silent."""
    now = known.clock.now()
    left = [each for each in known.run.there if each.is_by_hand and (each.has_stopped or each.is_silent(now))]
    known.tell(*(replace(each.process, phase="left") for each in left if each.process is not None))
    return [f"{each.stage} {each.worker}" for each in left]
