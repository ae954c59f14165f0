"""Supervisor of a process, which ends the run at the first service that fails or stalls."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from rlhfspec.errors import LoopStalled, RLHFSpecError, StageError, StageFailed, StageStalled
from rlhfspec.messages.loop import BY_NAME, SUPERVISED
from rlhfspec.messages.transport.clock import first_of
from rlhfspec.stage.base import Service
from rlhfspec.stage.vitals import Vitals, WorkerState

log = logging.getLogger("rlhfspec.stage")
STAGE_NAMES = {stage.name for stage in SUPERVISED}
STALL_SECONDS = 300.0  # for which all workers may wait for each other
GRACE_SECONDS = 120.0  # for the trainer to end its step and write a checkpoint
Tasks = dict[asyncio.Task[None], Service]


class Supervisor:
    """Supervisor of services until the `final` stages return, one fails, or all have waited for `stall_seconds`."""

    def __init__(
        self,
        vitals: Vitals,
        *,
        stall_seconds: float,
        grace_seconds: float = 30.0,
        check_seconds: float = 1.0,
        final: tuple[str, ...] = ("trainer",),
    ) -> None:
        self._vitals = vitals
        self._clock = vitals.clock
        self._stall_seconds = stall_seconds
        self._grace_seconds = grace_seconds
        self._check_seconds = check_seconds
        self._final = final

    async def run(self, services: Sequence[Service], stop: asyncio.Event) -> None:
        """Run until the final services are done or `stop` is set; raise `StageError` for a failure."""
        tasks = {_start(service, service.run()): service for service in services}
        stopped = asyncio.create_task(stop.wait())
        began = self._clock.now()
        try:
            while not (self._is_over(tasks) or stop.is_set()):
                await first_of(self._clock, [*_pending(tasks), stopped], self._check_seconds)
                _note_the_ended(tasks)
                _raise_failure(tasks)
                self._raise_stall(tasks, began)
            await self._ask_to_stop(tasks)
            _note_the_ended(tasks)
        finally:
            stopped.cancel()
            await self._cancel(tasks)

    def _is_over(self, tasks: Tasks) -> bool:
        final = {task: service for task, service in tasks.items() if service.stage in self._final}
        return not _pending(final or tasks)

    async def _ask_to_stop(self, tasks: Tasks) -> None:
        asked = {_start(tasks[task], tasks[task].stop()): tasks[task] for task in _pending(tasks)}
        try:
            await self._wait_within_grace(tasks | asked)
            _raise_failure(tasks | asked)
        finally:
            for task in asked:
                task.cancel()
        for task in _pending(tasks):
            log.warning("%s did not stop within %g s and is cancelled", task.get_name(), self._grace_seconds)

    async def _cancel(self, tasks: Tasks) -> None:
        cancelled = _pending(tasks)
        for task in cancelled:
            task.cancel()
        await self._wait_within_grace(cancelled)
        for task in _pending(tasks):
            log.error("%s does not stop although it was cancelled, and is left behind", task.get_name())
        for task in cancelled:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                log.error("%s failed while it was cancelled", task.get_name(), exc_info=error)
        for service in tasks.values():
            service.close()

    async def _wait_within_grace(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        end = self._clock.now() + self._grace_seconds
        while (pending := _pending(tasks)) and (left := end - self._clock.now()) > 0:
            await first_of(self._clock, pending, left)

    def _raise_stall(self, tasks: Tasks, began: float) -> None:
        states = [service.vitals.state() for service in tasks.values()]
        for state in states:
            if is_overdue(state):
                raise StageStalled(state.stage, state.worker, state.what, state.since_seconds)
        quiet = min(self._vitals.quiet_seconds(), self._clock.now() - began)
        raise_if_all_wait(states, quiet, self._stall_seconds)


def is_overdue(state: WorkerState, by_seconds: float = 0.0) -> bool:
    return state.doing == "working" and state.overdue_seconds > by_seconds


def raise_if_all_wait(states: Iterable[WorkerState], quiet_seconds: float, stall_seconds: float) -> None:
    waiting = [state for state in states if state.doing == "waiting"]
    if waiting and quiet_seconds > stall_seconds:
        raise LoopStalled(quiet_seconds, _waits(waiting))


def _start(service: Service, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    return asyncio.create_task(what, name=f"{service.stage} {service.worker}")


def _pending(tasks: Iterable[asyncio.Task[None]]) -> list[asyncio.Task[None]]:
    return [task for task in tasks if not task.done()]


def _note_the_ended(tasks: Tasks) -> None:
    for task, service in tasks.items():
        if task.done():
            service.vitals.stopped()


def _raise_failure(tasks: Tasks) -> None:
    """Raise the error of the first failed service, in order."""
    for task, service in tasks.items():
        if not task.done():
            continue
        if task.cancelled():
            raise StageFailed(service.stage, service.worker, "it was cancelled, but not by the supervisor")
        if (error := task.exception()) is not None:
            if isinstance(error, StageError):
                raise error
            raise StageFailed(service.stage, service.worker, reason_of(error)) from error


def reason_of(error: BaseException) -> str:
    """Return an error as text, preceded by its type unless it is an RLHFSpecError."""
    return str(error) if isinstance(error, RLHFSpecError) else f"{type(error).__name__}: {error}"


def _waits(states: Iterable[WorkerState]) -> list[tuple[str, int, str, float]]:
    """Return (stage, worker, awaited, seconds) of waiting workers, stages before other services, longest first."""
    ordered = sorted(states, key=lambda state: (state.stage not in STAGE_NAMES, -state.since_seconds))
    return [(state.stage, state.worker, _wait(state), state.since_seconds) for state in ordered]


def _wait(state: WorkerState) -> str:
    stage = BY_NAME.get(state.stage)
    return f"{state.what}, from {' or '.join(stage.unblocked_by)}" if stage else state.what
