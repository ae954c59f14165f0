"""Daemon threads for compute, where a hanging call delays neither event loop nor exit."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
_R = TypeVar("_R")
log = logging.getLogger("rlhfspec.stage")


@dataclass(frozen=True, slots=True)
class _Call:
    call: Callable[[], Any]
    outcome: Future[Any] = field(default_factory=Future)

    def run(self) -> None:
        if not self.outcome.set_running_or_notify_cancel():
            return
        try:
            result = self.call()
        except BaseException as error:  # any error must reach the awaiting task
            self.outcome.set_exception(_as_exception(error))
        else:
            self.outcome.set_result(result)


class ComputeThread:
    """Thread of one worker's compute. If its running call is cancelled, later calls use a new thread."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._jobs: queue.SimpleQueue[_Call | None] | None = None
        self._num_started = 0

    async def in_thread(self, function: Callable[P, _R], /, *args: P.args, **kwargs: P.kwargs) -> _R:
        context = contextvars.copy_context()  # keeps the sample id of log lines
        job = _Call(partial(context.run, function, *args, **kwargs))
        jobs = self._running()
        jobs.put(job)
        try:
            result: _R = await asyncio.wrap_future(job.outcome)
        except asyncio.CancelledError:
            self._leave_behind(job, jobs)
            raise
        return result

    def close(self) -> None:
        """End the thread after its queued calls."""
        if self._jobs is not None:
            self._jobs.put(None)
            self._jobs = None

    def _running(self) -> queue.SimpleQueue[_Call | None]:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            self._num_started += 1
            name = f"{self.name}/{self._num_started}"
            threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True).start()
        return self._jobs

    def _leave_behind(self, job: _Call, jobs: queue.SimpleQueue[_Call | None]) -> None:
        if job.outcome.cancel() or job.outcome.done():
            return  # not begun, or over
        log.warning("%s: cancelled while it computes; its thread keeps running", self.name)
        if jobs is self._jobs:
            self.close()


def _work(jobs: queue.SimpleQueue[_Call | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # keep neither arguments nor result alive while waiting


def _as_exception(error: BaseException) -> Exception:
    """Return the error, wrapped if a future would refuse it or take it for a cancellation."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | CancelledError):
        return error
    wrapped = RuntimeError(f"the call raised {error!r}")
    wrapped.__cause__ = error
    return wrapped
