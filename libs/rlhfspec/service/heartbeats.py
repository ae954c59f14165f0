"""Says on the bus what the workers of this process do, for whoever looks on from another."""

from __future__ import annotations

from dataclasses import asdict, replace

from rlhfspec.records import Heartbeat
from rlhfspec.service.base import Service
from rlhfspec.service.bus import Bus
from rlhfspec.service.vitals import Vitals, WorkerState

EVERY_SECONDS = 0.25


class Heartbeats(Service):
    """consumes: the vitals of this process; produces: Heartbeat; waits for: the next beat; unblocked by: time."""

    def __init__(self, bus: Bus, vitals: Vitals) -> None:
        super().__init__("heartbeats", 0, vitals)
        self._all = vitals
        self._bus = bus

    async def run(self) -> None:
        while not self.stopping.is_set():
            for state in self._all.snapshot():
                await self._bus.publish(self._beat(state))
            await self.pause("the next beat", EVERY_SECONDS)
        for state in self._all.snapshot():  # the last: who leaves is not taken for one that died
            await self._bus.publish(self._beat(replace(state, doing="stopped", what="leaves")))

    def _beat(self, state: WorkerState) -> Heartbeat:
        return Heartbeat(id=f"{self._bus.job}/{state.stage}/{state.worker}", job=self._bus.job, **asdict(state))
