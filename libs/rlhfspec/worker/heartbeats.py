"""Publishes what the workers of this process do, for the other processes of the run."""

from __future__ import annotations

from dataclasses import asdict, replace

from rlhfspec.messages.records import Heartbeat
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.pace import Beats
from rlhfspec.stage.vitals import Vitals, WorkerState


class Heartbeats(Service):
    """consumes: the vitals of this process; produces: Heartbeat; waits for: the next beat; unblocked by: time, and
    whoever begins something after a while in which nothing changed."""

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
        for state in self._all.snapshot():  # the last: a worker that exits is not taken for one that died
            await self._bus.publish(self._beat(replace(state, doing="stopped", what="leaves")))

    def _beat(self, state: WorkerState) -> Heartbeat:
        return Heartbeat(id=f"{self._bus.job}/{state.stage}/{state.worker}", job=self._bus.job, **asdict(state))
