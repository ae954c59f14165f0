"""The rebalancing stage: what generators say of themselves in, advice which samples go on elsewhere out."""

from __future__ import annotations

from rlhfspec.job import RLHFJob
from rlhfspec.records import Load
from rlhfspec.service.base import Service
from rlhfspec.service.bus import StageBus
from rlhfspec.service.vitals import Vitals


class RebalancerService(Service):
    """Watches Load, Moved, Sample; produces Move, Plan; waits for generators to say what they have; unblocked by
    nobody: it needs nothing.

    It knows only what signals say, so that it can die, be late or be wrong: that costs balance, never a token.
    """

    def __init__(self, worker: int, vitals: Vitals, bus: StageBus, *, job: RLHFJob) -> None:
        super().__init__("rebalancer", worker, vitals)
        self._bus = bus
        self._settings = job.spec.roles.rebalancer

    async def run(self) -> None:
        async with await self._bus.subscribe(Load) as loads:
            while not self.stopping.is_set():
                with self.vitals.waiting("generators to say what they have"):
                    await self.unless_stopped(loads.pull(max_records=1024, timeout_seconds=1.0))
