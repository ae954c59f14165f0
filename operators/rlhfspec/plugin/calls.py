"""An event loop in a thread of its own: the client of the API server is asynchronous, and a command is not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator
from concurrent.futures import CancelledError
from typing import TypeVar

T = TypeVar("T")


class Calls:
    """Of any thread. `close` ends what is still under way."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="calls", daemon=True)
        self._thread.start()

    def result(self, call: Awaitable[T]) -> T:
        async def awaited() -> T:
            return await call

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def each(self, found: AsyncIterator[T]) -> Iterator[T]:
        while True:
            try:
                each = self.result(anext(found))
            except (StopAsyncIteration, CancelledError):
                return
            yield each

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._loop.shutdown_asyncgens()
