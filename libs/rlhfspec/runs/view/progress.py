"""Progress of a run for the view: completed steps and the state of the current one.

Collections are replaced, never modified, for the drawing thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import Load, Moved, MoveOutcome, Plan, Sample
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.runs.live.run_state import RunState
from rlhfspec.runs.view.roster import ProcessState, process_states

_STEPS_OF_ETA = 8
_WINDOW_SECONDS = 5.0


class RunProgress:
    """Progress of a run; `now` returns monotonic seconds."""

    def __init__(self, job: RLHFJob, now: Callable[[], float]) -> None:
        self.job = job
        self.num_steps = job.spec.training.steps
        self.num_samples = job.spec.training.prompts_per_step * job.spec.algorithm.samples_per_prompt
        self.steps: tuple[StepMetrics, ...] = ()
        self.evaluations: tuple[Evaluation, ...] = ()
        self.loads: tuple[Load, ...] = ()
        self.workers: tuple[tuple[ProcessState, float], ...] = ()  # with utilisation
        self.last_sample: Sample | None = None
        self.moves: Counter[MoveOutcome] = Counter()  # ended moves by outcome
        self._learnt = (-1, 0)  # (newest drafter version seen, policy version at that time)
        self.drafter_age: int | None = None  # steps since a drafter last learnt; None: not yet seen
        self.why_moved = ""  # reason of the last plan
        self._done: set[str] = set()
        self._step_of_samples = 0
        self._now = now
        self._began = self._step_began = now()
        self._busy_before: tuple[tuple[float, Mapping[tuple[str, int], float]], ...] = ()

    def history(self, steps: Sequence[StepMetrics], evaluations: Sequence[Evaluation] = ()) -> None:
        self.steps, self.evaluations = tuple(steps), tuple(evaluations)

    def step(self, metrics: StepMetrics) -> None:
        self.steps = (*self.steps, metrics)
        self._step_began = self._now()

    def evaluation(self, evaluation: Evaluation) -> None:
        self.evaluations = (*self.evaluations, evaluation)

    def sample(self, sample: Sample) -> None:
        if sample.step != self._step_of_samples:
            self._step_of_samples, self._done = sample.step, set()
        self._done.add(sample.id)
        self.last_sample = sample

    def known(self, run: RunState, now: float) -> None:
        self.take_loads([worker.load for worker in run.generators if worker.load is not None])
        self.take_workers(process_states(run, now))

    def take_loads(self, loads: Sequence[Load]) -> None:
        self.loads = tuple(loads)
        learnt = max((load.drafter_version for load in self.loads), default=0)
        policy = max((load.weights_version for load in self.loads), default=0)
        before, since = self._learnt
        if learnt > before:
            self._learnt = (learnt, policy)
            self.drafter_age = 0 if before >= 0 else None
        elif self.drafter_age is not None:
            self.drafter_age = policy - since

    def moved(self, moved: Moved) -> None:
        self.moves = self.moves + Counter((moved.how,))

    def plan(self, plan: Plan) -> None:
        reasons = [move.reason for move in plan.moves] or plan.why_not
        self.why_moved = reasons[0] if reasons else self.why_moved

    def take_workers(self, states: Sequence[ProcessState]) -> None:
        shares = self._shares({(state.stage, state.worker): state.busy_seconds for state in states})
        self.workers = tuple((state, shares[state.stage, state.worker]) for state in states)

    def _shares(self, busy: Mapping[tuple[str, int], float]) -> dict[tuple[str, int], float]:
        now = self._now()
        kept = [entry for entry in self._busy_before if now - entry[0] <= _WINDOW_SECONDS]
        older = [entry for entry in self._busy_before if now - entry[0] > _WINDOW_SECONDS]
        self._busy_before = (*older[-1:], *kept, (now, busy))
        before_at, before = self._busy_before[0] if len(self._busy_before) > 1 else (self._began, {})
        passed = max(now - before_at, 1e-9)
        return {key: min(1.0, max(0.0, (value - before.get(key, 0.0)) / passed)) for key, value in busy.items()}

    @property
    def current_step(self) -> int:
        return min(self.num_steps, self.steps[-1].step + 1 if self.steps else 1)

    @property
    def num_steps_done(self) -> int:
        return self.steps[-1].step if self.steps else 0

    @property
    def num_samples_done(self) -> int:
        return len(self._done) if self._step_of_samples == self.current_step else 0

    @property
    def elapsed_seconds(self) -> float:
        return self._now() - self._began

    @property
    def eta_seconds(self) -> float | None:
        recent = [metrics.seconds.step for metrics in self.steps[-_STEPS_OF_ETA:]]
        if not recent:
            return None
        mean = sum(recent) / len(recent)
        remaining = (self.num_steps - self.num_steps_done) * mean
        return max(0.0, remaining - min(mean, self._now() - self._step_began))
