"""Base class of a stage's worker."""

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

PULL_SECONDS = 5.0  # timeout of a pull; records or a stop end it at once
P = ParamSpec("P")
_R = TypeVar("_R")
_Received = TypeVar("_Received", bound=Record)


class Service(ABC):
    """Worker of a stage. Docstrings of subclasses name *consumes / produces / waits for / unblocked by*.

    - `run` returns when the work is done or soon after `stop`; it raises if it cannot continue.
    - `self.vitals` receives its state: `working` with a deadline, or `waiting`, the default.
    - Slow calls run through `in_thread`, never in the event loop.
    """

    def __init__(self, stage: str, worker: int, vitals: Vitals) -> None:
        self.stage = stage
        self.worker = worker
        self.vitals = vitals.worker(stage, worker)
        self.stopping = asyncio.Event()
        self.models: Mapping[str, ModelReport] = {}  # loaded models, by role
        self.beside: list[Service] = []  # services that run in the same process
        self.leaving = ExitStack()  # resources to release when the worker is closed
        self._thread = ComputeThread(f"{stage}-{worker}")

    @abstractmethod
    async def run(self) -> None: ...

    async def stop(self) -> None:
        """Set `self.stopping`, so that `run` returns soon."""
        self.stopping.set()

    @property
    def said_at_the_end(self) -> str:
        return "left: it was asked to"

    async def unless_stopped(self, wait: Coroutine[Any, Any, list[_R] | None], *events: asyncio.Event) -> list[_R]:
        """Await `wait` and return its result, or [] once the service stops or one of `events` is set."""
        waiting = asyncio.create_task(wait)
        ends = [asyncio.create_task(event.wait()) for event in (self.stopping, *events)]
        try:
            await asyncio.wait([waiting, *ends], return_when=asyncio.FIRST_COMPLETED)
            return (waiting.result() if waiting.done() else None) or []
        finally:
            for task in (waiting, *ends):
                task.cancel()

    async def arrivals(self, inbox: Inbox[_Received]) -> AsyncIterator[list[Delivery[_Received]]]:
        while not self.stopping.is_set():
            pulling = inbox.pull(max_records=1024, timeout_seconds=PULL_SECONDS)
            if arrived := await self.unless_stopped(pulling):
                yield arrived

    async def pause(self, what: str, seconds: float) -> None:
        """Sleep, or return early at a stop, and report meanwhile that the worker waits for `what`."""
        with self.vitals.waiting(what), suppress(TimeoutError):
            await asyncio.wait_for(self.stopping.wait(), seconds)

    async def in_thread(self, function: Callable[P, _R], /, *args: P.args, **kwargs: P.kwargs) -> _R:
        return await self._thread.in_thread(function, *args, **kwargs)

    def close(self) -> None:
        """End the worker's thread and release its resources."""
        self._thread.close()
        self.leaving.close()
