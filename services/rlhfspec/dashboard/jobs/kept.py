"""Cache with one request for all concurrent callers of a key.

>>> async def main() -> list[int]:
...     asked = []
...     async def ask() -> int:
...         asked.append(1)
...         return len(asked)
...     kept = Kept(seconds=60.0)
...     return [await kept.get("a", ask), await kept.get("a", ask), await kept.get("b", ask)]
>>> asyncio.run(main())
[1, 1, 2]
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

from rlhfspec.messages.transport.clock import Clock, SystemClock

V = TypeVar("V")


class Kept(Generic[V]):
    """Cache of the newest `most` results for `seconds` each. Errors reach all waiting callers and are not cached."""

    def __init__(self, *, seconds: float, most: int = 2000, clock: Clock | None = None) -> None:
        self._seconds = seconds
        self._most = most
        self._clock = clock or SystemClock()
        self._answers: OrderedDict[Hashable, tuple[float, asyncio.Future[V]]] = OrderedDict()

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[V]]) -> V:
        now = self._clock.now()
        found = self._answers.get(key)
        if found is None or now - found[0] >= self._seconds or _failed(found[1]):
            task = asyncio.ensure_future(ask())
            self._answers[key] = found = (now, task)
            self._answers.move_to_end(key)
            while len(self._answers) > self._most:
                self._answers.popitem(last=False)
        return await asyncio.shield(found[1])


def _failed(answer: asyncio.Future[V]) -> bool:
    return answer.done() and (answer.cancelled() or answer.exception() is not None)
