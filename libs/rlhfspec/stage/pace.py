"""Polling intervals that are short after news and grow without it.

Example:
    >>> pace = Pace(0.5, 5.0)
    >>> [pace.after(news) for news in ("", "", "", "", "", "a sample", "")]
    [1.0, 2.0, 4.0, 5.0, 5.0, 0.5, 1.0]
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, replace
from typing import Any

from rlhfspec.messages.records import Heartbeat
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.vitals import Vitals, WorkerState

LIVE_BEAT_SECONDS, IDLE_BEAT_SECONDS = 0.25, 2.0


class Pace:
    def __init__(self, shortest: float, longest: float) -> None:
        self.seconds = shortest
        self._shortest = shortest
        self._longest = longest

    def after(self, news: object) -> float:
        self.seconds = self._shortest if news else min(2 * self.seconds, self._longest)
        return self.seconds


class Beats:
    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._pace = Pace(LIVE_BEAT_SECONDS, IDLE_BEAT_SECONDS)
        self._told: object = None

    async def next(self, told: object, stopping: asyncio.Event) -> None:
        """Wait until the next report or a stop; the wait is short if `told`, the state last reported, has changed."""
        seconds, self._told = self._pace.after(told != self._told), told
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(stopping.wait())]
        if seconds > LIVE_BEAT_SECONDS:
            waits.append(asyncio.create_task(self._vitals.until_change()))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()


class Heartbeats(Service):
    """Service that publishes heartbeats.

    consumes: this process's vitals; produces: Heartbeat; waits for: the next beat; unblocked by: time and activity.
    """

    def __init__(self, bus: Bus, vitals: Vitals) -> None:
        super().__init__("heartbeats", 0, vitals)
        self._all = vitals
        self._bus = bus

    async def run(self) -> None:
        beats = Beats(self._all)
        while not self.stopping.is_set():
            states = self._all.snapshot()
            for state in states:
                await self._bus.publish(self._beat(state))
            with self.vitals.waiting("the next beat"):
                await beats.next([state.without_times() for state in states], self.stopping)
        for state in self._all.snapshot():  # a last beat, so that a worker that leaves is not taken for dead
            await self._bus.publish(self._beat(replace(state, doing="stopped", what="leaves")))

    def _beat(self, state: WorkerState) -> Heartbeat:
        return Heartbeat(id=f"{self._bus.job}/{state.stage}/{state.worker}", job=self._bus.job, **asdict(state))
