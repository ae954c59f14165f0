"""Calls into an engine between two of its steps."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from rlhfspec.errors import RLHFSpecError

BUDGET_SECONDS = 0.001  # between two steps, so that sequences are not delayed
T = TypeVar("T")


class EngineStopped(RLHFSpecError):
    def __init__(self) -> None:
        super().__init__("the engine has stopped")


class EngineCalls:
    """Queue of functions: added by `call` in the event loop, executed by `run` in the engine's thread."""

    def __init__(self, on_call: Callable[[], None] = lambda: None) -> None:
        self._on_call = on_call
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._closed = False
        self.longest_seconds = 0.0  # of one call

    def call(self, do: Callable[[], T]) -> asyncio.Future[T]:
        """Queue `do`; the returned future raises its RLHFSpecError, or EngineStopped for other errors."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._lock:
            if self._closed:
                raise EngineStopped
            self._queue.append(lambda: self._make(do, loop, future))
        self._on_call()
        return future

    @property
    def waiting(self) -> int:
        return len(self._queue)

    def run(self, budget_seconds: float = BUDGET_SECONDS) -> None:
        """Run at least one waiting call, and more until the budget is spent."""
        began = time.perf_counter()
        while self._queue:
            self._queue.popleft()()
            if time.perf_counter() - began >= budget_seconds:
                return

    def close(self) -> None:
        """End waiting calls with EngineStopped; call it in the engine's thread or after its end."""
        with self._lock:
            self._closed = True
        while self._queue:
            self._queue.popleft()()

    def _make(self, do: Callable[[], T], loop: asyncio.AbstractEventLoop, future: asyncio.Future[T]) -> None:
        result: Any = None
        error: RLHFSpecError | None = EngineStopped()
        began = time.perf_counter()
        try:
            if not self._closed:
                result, error = do(), None
        except RLHFSpecError as raised:
            error = raised
        finally:
            self.longest_seconds = max(self.longest_seconds, time.perf_counter() - began)
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: RLHFSpecError | None) -> None:
    if future.cancelled():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
