"""The observer of a run: shows what the generators and the trainer say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from rlhfspec.loop import STAGES
from rlhfspec.records import Load, Sample, StepReport
from rlhfspec.service.base import Service
from rlhfspec.service.bus import StageBus
from rlhfspec.service.vitals import Vitals
from rlhfspec.telemetry.metrics import StepMetrics
from rlhfspec.telemetry.view import View

LOOK_SECONDS = 0.1
STAGE_NAMES = {stage.name for stage in STAGES}  # not the observers


class WatchService(Service):
    """Consumes Sample, Load, StepReport; produces nothing; waits for something to show; unblocked by generator,
    trainer."""

    def __init__(self, vitals: Vitals, bus: StageBus, *, view: View, heard: Callable[[Load], None]) -> None:
        super().__init__("view", 0, vitals)
        self._all = vitals
        self._bus = bus
        self._view = view
        self._heard = heard

    async def run(self) -> None:
        samples = await self._bus.subscribe(Sample)
        loads = await self._bus.subscribe(Load)
        reports = await self._bus.subscribe(StepReport)
        while True:
            last = self.stopping.is_set()  # what was published before the stop is still shown
            for load in await loads.pull(max_records=64, timeout_seconds=0.0):
                self._heard(load.record)
                self._view.load(load.record)
                await load.ack()
            for sample in await samples.pull(max_records=1024, timeout_seconds=0.0):
                self._view.sample(sample.record)
                await sample.ack()
            for report in await reports.pull(max_records=64, timeout_seconds=0.0):
                self._view.step(StepMetrics.from_line(report.record.metrics_json))
                await report.ack()
            self._view.vitals([state for state in self._all.snapshot() if state.stage in STAGE_NAMES])
            if last:
                return
            with self.vitals.waiting("something to show"), suppress(TimeoutError):
                await asyncio.wait_for(self.stopping.wait(), LOOK_SECONDS)
