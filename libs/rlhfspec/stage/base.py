"""What a stage's worker is: it runs until its work is done or it is asked to stop, and says what it does meanwhile."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from typing import Any, ParamSpec, TypeVar

from rlhfspec.messages.records import Record
from rlhfspec.messages.records.models import ModelReport
from rlhfspec.stage.bus import Delivery, Inbox
from rlhfspec.stage.threads import ComputeThread
from rlhfspec.stage.vitals import Vitals

PULL_SECONDS = 5.0  # for records; whatever comes ends the wait at once, and so does a stop
P = ParamSpec("P")
_R = TypeVar("_R")
_Received = TypeVar("_Received", bound=Record)


class Service(ABC):
    """One worker of one stage. A subclass's docstring says *consumes / produces / waits for / unblocked by*.

    - `run` returns when the work is done, or soon after `stop`; it raises when it cannot go on.
    - All it does is said to `self.vitals`: `working` with a deadline, or `waiting` for something named.
      A worker that says nothing counts as waiting.
    - What takes longer than a moment runs through `in_thread`, never in the event loop itself.

    Example:
        >>> class Echo(Service):
        ...     async def run(self) -> None:
        ...         with self.vitals.working("2 + 2", deadline_seconds=5.0):
        ...             self.answer = await self.in_thread(sum, (2, 2))
        >>> echo = Echo("reward", 0, Vitals())
        >>> asyncio.run(echo.run()); echo.answer
        4
    """

    def __init__(self, stage: str, worker: int, vitals: Vitals) -> None:
        self.stage = stage
        self.worker = worker
        self.vitals = vitals.worker(stage, worker)
        self.stopping = asyncio.Event()
        self.models: Mapping[str, ModelReport] = {}  # by role: of each that it loaded
        self.beside: list[Service] = []  # that its process runs along with it
        self.leaving = ExitStack()  # what is to be given back when the worker is closed
        self._thread = ComputeThread(f"{stage}-{worker}")

    @abstractmethod
    async def run(self) -> None: ...

    async def stop(self) -> None:
        """Asks `run` to return soon. By default sets `self.stopping`, which `run` looks at."""
        self.stopping.set()

    @property
    def said_at_the_end(self) -> str:
        """Return how far it came, for the state of its process afterwards."""
        return "left: it was asked to"

    async def unless_stopped(self, wait: Coroutine[Any, Any, list[_R] | None], *events: asyncio.Event) -> list[_R]:
        """Return what the wait brings. Cancel it, and return nothing, as soon as the worker is asked to stop, or one of
        these is set."""
        waiting = asyncio.create_task(wait)
        ends = [asyncio.create_task(event.wait()) for event in (self.stopping, *events)]
        try:
            await asyncio.wait([waiting, *ends], return_when=asyncio.FIRST_COMPLETED)
            return (waiting.result() if waiting.done() else None) or []
        finally:
            for task in (waiting, *ends):
                task.cancel()

    async def arrivals(
        self, inbox: Inbox[_Received], *, most_at_once: int = 1024
    ) -> AsyncIterator[list[Delivery[_Received]]]:
        """Yield what comes to an inbox, as it comes, until the worker is asked to stop."""
        while not self.stopping.is_set():
            pulling = inbox.pull(max_records=most_at_once, timeout_seconds=PULL_SECONDS)
            if arrived := await self.unless_stopped(pulling):
                yield arrived

    async def pause(self, what: str, seconds: float) -> None:
        """Waits for that long, saying for what; not longer than until it is asked to stop."""
        with self.vitals.waiting(what), suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)

    async def in_thread(self, function: Callable[P, _R], /, *args: P.args, **kwargs: P.kwargs) -> _R:
        """Computes in this worker's own thread (`ComputeThread`)."""
        return await self._thread.in_thread(function, *args, **kwargs)

    def close(self) -> None:
        """Said when the run is over, however it ended: the worker's thread may end, and others take what it held."""
        self._thread.close()
        self.leaving.close()
