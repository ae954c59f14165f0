"""What control knows of a run: from records as they come, and from the run's folder what was before it looked.

Pure but for its clock. It holds no work, and what it forgets when it is started again, it hears again within seconds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from rlhfspec.cluster.report import Report, Trouble
from rlhfspec.control.report import RECENT_STEPS, Facts, report_of
from rlhfspec.control.troubles import Failing, broker_unavailable, reward_failing, stalled, undeliverable
from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import DatasetInfo, Heartbeat, Load, Plan, StepReport, WorkerInfo
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.runs.view.roster import Roster
from rlhfspec.runs.view.run_state import RunState, RunWorker, after
from rlhfspec.stage.silence import is_silent
from rlhfspec.stage.supervisor import STAGE_NAMES, STALL_SECONDS, is_overdue

AWAY_SECONDS = 3.5  # the broker is asked every second
GONE_SECONDS = 60.0  # a silent worker whose stage has others is not waited for any longer
_QUIET_SECONDS = 5.0  # a generator's load that is older says nothing
MOST_LETTERS = 12
Worker = tuple[str, int]


class RunKnowledge:
    """`today`: the time of the day, for people."""

    def __init__(
        self,
        job: RLHFJob,
        run: str,
        broker: str,
        clock: Clock,
        *,
        stall_seconds: float = STALL_SECONDS,
        today: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.roster = Roster(clock)
        self._job, self._run, self._broker = job, run, broker
        self._clock, self._today = clock, today
        self._stall_seconds = stall_seconds
        self._total_steps = job.spec.training.steps
        self._steps: tuple[StepMetrics, ...] = ()
        self._checkpoint_step = 0
        self._stepped_at = clock.now()
        self._there: set[Worker] = set()  # who has said something, and not that it leaves
        self._infos: dict[Worker, WorkerInfo] = {}  # as they were last told, perhaps by processes that are gone
        self._failing: dict[Worker, Failing] = {}
        self._told = RunState()  # loads, and how many generators are wanted
        self._letters: list[str] = []
        self._answered_at = clock.now()
        self._answered_today = today()
        self._answers_since: float | None = None  # without a break

    # --- what is heard -------------------------------------------------------------------------------------------

    def broker_answered(self) -> None:
        now = self._clock.now()
        if self._is_broker_away() or self._answers_since is None:
            self._answers_since = now
        self._answered_at, self._answered_today = now, self._today()

    def heard(self, beat: Heartbeat) -> None:
        key = (beat.stage, beat.worker)
        if beat.stage not in STAGE_NAMES:
            return
        if beat.doing == "stopped":
            return self._left(key, beat.what)
        if key not in self._there:
            self._there.add(key)
            self.roster.started(*key, pid=None)
            if key in self._infos:
                self.roster.joined(self._infos[key])
        self.roster.heard(beat)
        if not beat.trouble:
            self._failing.pop(key, None)
        elif key not in self._failing:
            self._failing[key] = Failing(beat.trouble, self._clock.now())

    def ready(self, info: WorkerInfo) -> None:
        """Kept by the broker for whoever comes later, so it may be of a process that is gone: only who is heard is
        there."""
        key = (info.stage, info.worker)
        if info.stage in STAGE_NAMES:
            self._infos[key] = info
            if key in self._there:
                self.roster.joined(info)

    def loaded(self, load: Load) -> None:
        self._told = after(self._told, [(self._clock.now(), load)])

    def planned(self, plan: Plan) -> None:
        self._told = after(self._told, [(self._clock.now(), plan)])

    def read(self, info: DatasetInfo) -> None:
        """Where the data ends before the job's steps do."""
        steps = self._job.spec.training.steps
        self._total_steps = min(info.last_step, steps) if info.last_step else steps

    def stepped(self, report: StepReport) -> None:
        self.found([report.metrics])
        self._stepped_at = self._clock.now()

    def found(self, steps: Sequence[StepMetrics]) -> None:
        """What comes after these is done again: the run goes on from a checkpoint before it."""
        if steps:
            before = tuple(metrics for metrics in self._steps if metrics.step < steps[0].step)
            self._steps = (*before, *steps)[-RECENT_STEPS:]
            self._stepped_at = self._clock.now() - max(
                self._today().timestamp() - self._steps[-1].finished_unix_seconds, 0.0
            )

    @property
    def is_trained(self) -> bool:
        """To its last step, as far as is known."""
        return bool(self._steps) and self._steps[-1].step >= self._total_steps

    def kept(self, checkpoint_step: int) -> None:
        self._checkpoint_step = checkpoint_step

    def could_not_be_handled(self, letter: str) -> None:
        if letter not in self._letters and len(self._letters) < MOST_LETTERS:
            self._letters.append(letter)

    # --- what follows --------------------------------------------------------------------------------------------

    def report(self) -> Report:
        now = self._clock.now()
        self._forget_the_gone()
        states = self.roster.worker_states()
        return report_of(
            Facts(
                run=self._run,
                total_steps=self._total_steps,
                seconds_since_step=now - self._stepped_at,
                steps=self._steps,
                checkpoint_step=self._checkpoint_step,
                workers=tuple(self.roster.states()),
                overdue=frozenset((state.stage, state.worker) for state in states if is_overdue(state)),
                loads={each.worker: each.load for each in self._told.generators if each.load and self._is_there(each)},
                generators_wanted=self._generators_wanted(),
                generators_wanted_because=self._told.why_wanted,
                troubles=tuple(self._troubles()),
            )
        )

    def _troubles(self) -> list[Trouble]:
        """While the broker is away nobody is heard, and for a moment after: that says nothing of the workers."""
        troubles = undeliverable(self._letters)
        if self._is_broker_away():
            since = self._answered_today.strftime("%H:%M:%SZ")
            return [broker_unavailable(self._broker, since), *troubles]
        troubles += reward_failing(self._failing, self._clock.now())
        if is_silent(self._heard_for()):  # before, a worker that is not heard may be well
            states, workers = self.roster.worker_states(), self.roster.states()
            quiet = min(self.roster.quiet_seconds(), self._heard_for())
            troubles += stalled(workers, states, quiet_seconds=quiet, stall_seconds=self._stall_seconds)
        return troubles

    def _is_broker_away(self) -> bool:
        return self._clock.now() - self._answered_at > AWAY_SECONDS

    def _heard_for(self) -> float:
        return 0.0 if self._answers_since is None else self._clock.now() - self._answers_since

    def _is_there(self, generator: RunWorker) -> bool:
        is_new = self._clock.now() - generator.loaded_at <= _QUIET_SECONDS
        return is_new and ("generator", generator.worker) in self._there

    def _left(self, key: Worker, what: str) -> None:
        self._failing.pop(key, None)
        if key in self._there:
            self._there.discard(key)
            self.roster.is_down(*key, "left", what)

    def _forget_the_gone(self) -> None:
        """One of several of its stage that fell silent for good was killed, and is not started again."""
        if self._heard_for() <= GONE_SECONDS:
            return
        for stage, worker in list(self._there):
            others = [key for key in self._there if key[0] == stage and key[1] != worker]
            others_speak = not all(is_silent(self.roster.silent_seconds(*key)) for key in others)
            if others_speak and self.roster.silent_seconds(stage, worker) > GONE_SECONDS:
                self._left((stage, worker), "it fell silent")

    def _generators_wanted(self) -> int | None:
        replicas = self._job.spec.roles.generator.replicas
        if self._told.num_wanted is None or replicas is None:
            return None
        return min(max(self._told.num_wanted, replicas.min), replicas.max)


def lines_of(steps: Sequence[StepMetrics]) -> list[str]:
    """As the window of the live view has them."""
    return [json.dumps(json.loads(metrics.to_line())) for metrics in steps]
