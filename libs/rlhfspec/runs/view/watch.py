"""The observer of a run: shows what the stages say."""

from __future__ import annotations

from rlhfspec.messages.records import EvaluationReport, Heartbeat, Load, Moved, Plan, Sample, StepReport
from rlhfspec.runs.live.live import RecentLines
from rlhfspec.runs.live.run_state import KnownRun
from rlhfspec.runs.view.view import View
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import StageBus
from rlhfspec.stage.pace import Pace
from rlhfspec.stage.vitals import Vitals

_LOOK_SECONDS, IDLE_LOOK_SECONDS = 0.1, 1.0


class WatchService(Service):
    """Show a run. Consumes Sample, Load, Moved, Plan, StepReport, EvaluationReport, Heartbeat; produces nothing; waits
    for something to show; unblocked by every stage."""

    def __init__(
        self,
        vitals: Vitals,
        bus: StageBus,
        *,
        view: View,
        recent: RecentLines | None = None,
        known: KnownRun | None = None,
    ) -> None:
        """Take `known`, the run of whose processes another service tells; None: a run in this process alone."""
        super().__init__("view", 0, vitals)
        self._known = known or KnownRun(vitals.clock)
        self._hears_beats = known is None
        self._bus = bus
        self._view = view
        self.recent = recent or RecentLines()
        self._listens = False

    async def listen(self) -> None:
        """Miss nothing from now on; to be said before the stages begin, where they begin before `run`."""
        self._samples = await self._bus.subscribe(Sample)
        self._loads = await self._bus.subscribe(Load)
        self._all_moved = await self._bus.subscribe(Moved)
        self._plans = await self._bus.subscribe(Plan)
        self._reports = await self._bus.subscribe(StepReport)
        self._evaluations = await self._bus.subscribe(EvaluationReport)
        if self._hears_beats:
            self._all_beats = await self._bus.subscribe(Heartbeat)
        self._listens = True

    async def run(self) -> None:
        if not self._listens:
            await self.listen()
        pace = Pace(_LOOK_SECONDS, IDLE_LOOK_SECONDS)
        while True:
            last = self.stopping.is_set()  # what was published before the stop is still shown
            pace.after(await self._show_what_came())
            self._view.known(self._known.run)
            if self._hears_beats:
                self._view.vitals(self._known.run.states)
            if last:
                return
            await self.pause("something to show", pace.seconds)

    async def _show_what_came(self) -> bool:
        """Return whether there was any of it; that a worker goes on waiting is no news."""
        loads = await self._loads.pull(max_records=64, timeout_seconds=0.0)
        self._known.tell(*(load.record for load in loads))
        all_moved = await self._all_moved.pull(max_records=1024, timeout_seconds=0.0)
        for moved in all_moved:
            self._view.moved(moved.record)
        plans = await self._plans.pull(max_records=64, timeout_seconds=0.0)
        self._known.tell(*(plan.record for plan in plans))
        for plan in plans:
            self._view.plan(plan.record)
        samples = await self._samples.pull(max_records=1024, timeout_seconds=0.0)
        for sample in samples:
            if sample.record.purpose == "training":
                self._view.sample(sample.record)
                self.recent.sample(sample.record.id, sample.record.prompt_text, sample.record.text)
        reports = await self._reports.pull(max_records=64, timeout_seconds=0.0)
        for report in reports:
            self._view.step(report.record.metrics)
            self.recent.step(report.record.metrics.to_line())
        evaluations = await self._evaluations.pull(max_records=64, timeout_seconds=0.0)
        for evaluation in evaluations:
            self._view.evaluation(evaluation.record.evaluation)
        if self._hears_beats:
            beats = await self._all_beats.pull(max_records=1024, timeout_seconds=0.0)
            self._known.tell(*(beat.record for beat in beats))
        runs = any(load.record.num_running for load in loads)
        return bool(runs or all_moved or plans or samples or reports or evaluations)
