"""Observer of a run, which updates the view."""

from __future__ import annotations

from typing import Any

from rlhfspec.messages.records import EvaluationReport, Heartbeat, Load, Moved, Plan, Record, Sample, StepReport
from rlhfspec.runs.live.live import RecentLines
from rlhfspec.runs.live.run_state import KnownRun
from rlhfspec.runs.view.view import View
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Inbox, StageBus
from rlhfspec.stage.pace import Pace
from rlhfspec.stage.supervisor import STAGE_NAMES
from rlhfspec.stage.vitals import Vitals

_VIEW_LOOK_SECONDS, IDLE_LOOK_SECONDS = 0.1, 1.0
_HEARD: tuple[type[Record], ...] = (Load, Moved, Plan, Sample, StepReport, EvaluationReport)


class WatchService(Service):
    """Service that displays a run.

    Consumes Sample, Load, Moved, Plan, StepReport, EvaluationReport, Heartbeat; produces nothing; waits for something
    to show; unblocked by every stage.
    """

    def __init__(
        self,
        vitals: Vitals,
        bus: StageBus,
        *,
        view: View,
        recent: RecentLines | None = None,
        known: KnownRun | None = None,
    ) -> None:
        """Create the service; `known` is the run's state if another service updates it."""
        super().__init__("view", 0, vitals)
        self._known = known or KnownRun(vitals.clock)
        self._hears_beats = known is None
        self._bus = bus
        self._view = view
        self.recent = recent or RecentLines()
        self._inboxes: list[Inbox[Any]] = []

    async def listen(self) -> None:
        """Subscribe, before any stage starts, so that no record is missed."""
        heard = (*_HEARD, Heartbeat) if self._hears_beats else _HEARD
        self._inboxes = [await self._bus.subscribe(record) for record in heard]

    async def run(self) -> None:
        if not self._inboxes:
            await self.listen()
        pace = Pace(_VIEW_LOOK_SECONDS, IDLE_LOOK_SECONDS)
        while True:
            last = self.stopping.is_set()  # records published before the stop are still shown
            pace.after(await self._show_what_came())
            self._view.progress.known(self._known.run, self._known.clock.now())
            if last:
                return
            await self.pause("something to show", pace.seconds)

    async def _show_what_came(self) -> bool:
        news = [
            self._show(delivery.record)
            for inbox in self._inboxes
            for delivery in await inbox.pull(max_records=1024, timeout_seconds=0.0)
        ]
        return any(news)

    def _show(self, record: Record) -> bool:
        """Display a record; return whether it is news: no heartbeat, no load of an idle generator."""
        progress = self._view.progress
        match record:
            case Heartbeat():
                if record.stage in STAGE_NAMES:
                    self._known.tell(record)
                return False
            case Load():
                self._known.tell(record)
                return record.num_running > 0
            case Plan():
                self._known.tell(record)
                progress.plan(record)
            case Moved():
                progress.moved(record)
            case Sample() if record.purpose == "training":
                progress.sample(record)
                self.recent.sample(record.id, record.prompt_text, record.text)
            case StepReport():
                self._view.step(record.metrics)
                self.recent.step(record.metrics.to_line())
            case EvaluationReport():
                self._view.evaluation(record.evaluation)
        return True
