"""Calls into an engine from the event loop, made in the engine's thread between two steps of it.

Example:
    >>> import asyncio, threading
    >>> async def main() -> int:
    ...     calls = EngineCalls()
    ...     answer = calls.call(lambda: 6 * 7)
    ...     threading.Thread(target=calls.run).start()  # what the engine's thread does between two steps
    ...     return await answer
    >>> asyncio.run(main())
    42
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from rlhfspec.errors import RLHFSpecError

BUDGET_SECONDS = 0.001  # between two steps, so that no sequence is held for long
T = TypeVar("T")


class EngineStopped(RLHFSpecError):
    """The engine's thread makes no more calls."""

    def __init__(self) -> None:
        super().__init__("the engine has stopped")


class EngineCalls:
    """`call` in the event loop, `run` in the engine's thread, anything else anywhere.

    `on_call`: told of each call; a loop that waits because its engine is idle must go on and `run`.
    """

    def __init__(self, on_call: Callable[[], None] = lambda: None) -> None:
        self._on_call = on_call
        self._lock = threading.Lock()
        self._queue: deque[Callable[[], None]] = deque()
        self._closed = False
        self.longest_seconds = 0.0  # that one call took

    def call(self, do: Callable[[], T]) -> asyncio.Future[T]:
        """In line at once, and made whether its result is awaited or not: calls come in the order of `call`.

        What `do` raises on purpose (RLHFSpecError) comes back; anything else is a bug, told here as EngineStopped and
        raised in the engine's thread. Raises EngineStopped when closed.
        """
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
        """One waiting call at least, and more until the budget is spent."""
        began = time.perf_counter()
        while self._queue:
            self._queue.popleft()()
            if time.perf_counter() - began >= budget_seconds:
                return

    def close(self) -> None:
        """From the engine's thread, or when it is no more: what waits ends with EngineStopped."""
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
