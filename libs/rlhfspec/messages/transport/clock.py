"""Real-time clock, and a manual clock for tests."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Iterable
from typing import Any, Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return monotonic seconds; callable from any thread."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class FakeClock:
    """Clock that only `advance` moves, waking sleepers in order of time."""

    # Rounds of the event loop in which a woken task reaches its next wait; tests need a handful.
    SETTLING_ROUNDS = 25

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now + max(seconds, 0.0), next(self._order), woken))
        await woken

    async def settle(self) -> None:
        """Run every runnable task without advancing time."""
        for _ in range(self.SETTLING_ROUNDS):
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        """Advance time, running each woken task at its own time."""
        end = self._now + seconds
        await self.settle()
        while self._sleepers and self._sleepers[0][0] <= end:
            self._now, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
                await self.settle()
        self._now = end
        await self.settle()


async def first_of(clock: Clock, awaited: Iterable[asyncio.Future[Any]], seconds: float) -> bool:
    """Wait up to `seconds` for any of the futures, and return whether one is done."""
    futures = list(awaited)
    if any(future.done() for future in futures):
        return True
    alarm = asyncio.create_task(clock.sleep(seconds))
    try:
        await asyncio.wait([*futures, alarm], return_when=asyncio.FIRST_COMPLETED)
    finally:
        alarm.cancel()
    return any(future.done() for future in futures)
