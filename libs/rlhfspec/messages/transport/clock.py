"""Clocks: `SystemClock` follows real time, `FakeClock` advances only in tests."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Iterable
from typing import Any, Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Return monotonic seconds since a fixed moment. Callable from any thread."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class FakeClock:
    """Clock that stands still until `advance`, which wakes sleepers in the order of their times."""

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
        """Run every task that can run, without time passing."""
        for _ in range(self.SETTLING_ROUNDS):
            await asyncio.sleep(0)

    async def advance(self, seconds: float) -> None:
        """Let time pass. A task that wakes on the way runs at its time, before time continues."""
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
    """Wait until one of the futures is done, or for `seconds`; return whether one is. Cancel none."""
    futures = list(awaited)
    if any(future.done() for future in futures):
        return True
    alarm = asyncio.create_task(clock.sleep(seconds))
    try:
        await asyncio.wait([*futures, alarm], return_when=asyncio.FIRST_COMPLETED)
    finally:
        alarm.cancel()
    return any(future.done() for future in futures)
