from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import Sample, Score
from rlhfspec.messages.records.evaluations import Evaluation, best
from rlhfspec.messages.records.metrics import Lengths, Seconds, Spread, StepMetrics, learner_fields
from rlhfspec.runs.folder.choosing import best_or_last
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.folder.sample_lines import by_column, evaluation_of
from rlhfspec.runs.folder.trackers import Trackers
from rlhfspec.runs.view.learning_signs import DISTINCT, collapse_of, equal_reward_groups
from rlhfspec.trainer.collector import Chosen, Collector
from rlhfspec.training.checkpoint import CheckpointStore
from rlhfspec.training.checkpoint.export import policy_of
from rlhfspec.training.checkpoint.folders import Writes, verify
from rlhfspec.training.checkpoint.shares import LEARNER
from rlhfspec.training.learning.learner import LearnReport
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.worker.mirror import Mirror

Export = Callable[[dict[str, Any]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Trainer's seconds between two step ends. Writing a step and its checkpoint counts towards the next step."""

    began_unix: float
    passed: float
    worked: float
    checkpoint: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    step: int
    chosen: Chosen
    rollouts: Rollouts
    report: LearnReport
    weights_digest: str
    time: StepTime


class RunRecorder:
    """Recorder of a run's steps, called from the trainer's thread."""

    def __init__(
        self,
        job: RLHFJob,
        folder: RunFolder,
        *,
        export: Export,
        verify: Callable[[Path], None] = verify,
        say: Callable[[str], None],
        mirror: Mirror | None = None,
    ) -> None:
        self._job = job
        self._folder = folder
        self._export = export
        self._verify = verify
        self._say = say
        self._mirror = mirror
        self._checkpoints: CheckpointStore | None = None
        self._trackers: Trackers | None = None
        self._evaluations: list[Evaluation] = []

    def restore(self) -> dict[str, Any] | None:
        """Return the learner's state of the latest checkpoint, or None, and drop all records of later steps."""
        self._checkpoints = CheckpointStore(
            self._folder.checkpoints, keep=self._job.spec.checkpoint.keep, verify=self._verify
        )
        step = self._checkpoints.latest() or 0
        opening = self._folder.go_on_after(step)
        for line in opening.told() if opening.resumed else ():
            self._say(line)
        self._evaluations = self._folder.evaluations()
        self._trackers = Trackers(self._job, self._folder, resume_at=step)
        if not step:
            return None
        state: dict[str, Any] = self._checkpoints.open(step)[LEARNER]
        self._checkpoints.discard_after(step)
        return state

    def record(self, trained: Trained) -> StepMetrics:
        assert self._trackers is not None, "restore comes first"
        self._folder.append_samples(trained.chosen.all_samples, trained.chosen.rewards)
        metrics = step_metrics(self._job, trained)
        self._folder.append_step(metrics)
        self._trackers.step(metrics)
        return metrics

    @property
    def collapse(self) -> str:
        return collapse_of(self._evaluations)

    def evaluate(self, collected: Collector, seconds: float) -> Evaluation:
        assert self._trackers is not None, "restore comes first"
        chosen, step = collected.collected(), collected.shape.step
        evaluation = evaluation_of(
            step,
            step,
            chosen.all_samples,
            chosen.rewards,
            max_tokens=self._job.spec.generation.max_tokens,
            seconds=seconds,
            column=self._job.spec.observability.by_column,
        )
        self._folder.append_evaluation(evaluation, chosen.all_samples, chosen.rewards)
        self._trackers.evaluation(evaluation)
        self._evaluations.append(evaluation)
        self._send()
        return evaluation

    def is_evaluated(self, step: int) -> bool:
        return any(evaluation.step == step for evaluation in self._evaluations)

    def checkpoint(self, step: int, state: dict[str, Any] | Writes) -> None:
        assert self._checkpoints is not None, "restore comes first"
        evaluated = [evaluation for evaluation in self._evaluations if evaluation.step]  # step 0 has no checkpoint
        self._checkpoints.save(step, {LEARNER: state}, best=best(evaluated).step if evaluated else None)
        self._send()

    def _send(self) -> None:
        """Send the folder to its object store, if any, before unrepeatable records are acknowledged."""
        if self._mirror is not None:
            self._mirror.send()

    def finish(self, step: int, policy_state: Callable[[], dict[str, Any]]) -> None:
        """Export the best evaluated checkpoint, or else the policy after `step`."""
        if not self._job.spec.checkpoint.export:
            return
        choice = best_or_last(self._folder)
        is_here = choice.step == step
        self._export(
            policy_state() if is_here else policy_of(self._folder.checkpoint(choice.step), self._job.spec.model)
        )
        self._folder.note_export(str(choice))
        self._say(f"exported: {choice}")

    def close(self) -> None:
        if self._trackers is not None:
            self._trackers.close()
        if self._checkpoints is not None:
            self._checkpoints.close()


def step_metrics(job: RLHFJob, trained: Trained) -> StepMetrics:
    """Return a step's metrics, which depend only on its records and the trainer's time."""
    chosen, samples = trained.chosen, trained.chosen.samples
    seconds = _seconds(trained.time, chosen.all_samples, chosen.all_scores)
    num_generated = sum(len(sample.token_ids) for sample in chosen.all_samples)
    lengths = [len(sample.token_ids) for sample in samples]
    num_prompts = len({sample.group_id for sample in samples})
    distinct = len({tuple(sample.token_ids) for sample in samples}) / num_prompts
    return StepMetrics(
        step=trained.step,
        weights_version=trained.report.version,
        weights_digest=trained.weights_digest,
        num_samples=len(samples),
        num_dropped=chosen.num_dropped,
        num_prompts=num_prompts,
        reward=Spread.of(trained.rollouts.rewards.tolist()),
        reward_components={name: float(v.mean()) for name, v in trained.rollouts.reward_components.items()},
        advantage=Spread.of(trained.report.advantages.tolist()),
        response_length=Lengths.of(lengths, max_tokens=job.spec.generation.max_tokens),
        num_response_tokens=trained.rollouts.num_tokens,
        equal_reward_groups=equal_reward_groups([s.group_id for s in samples], trained.rollouts.rewards.tolist()),
        tokens_per_second=num_generated / seconds.generation if seconds.generation > 0 else None,
        accepted_per_verification=_accepted(chosen.all_samples),
        strategy=_strategies(chosen.all_samples),
        expert_rows=_expert_rows(chosen.all_samples),
        seconds=seconds,
        started_unix_seconds=trained.time.began_unix,
        finished_unix_seconds=trained.time.began_unix + seconds.step,
        **by_column(job.spec.observability.by_column, samples, chosen.rewards),
        **learner_fields(trained.report.metrics | {DISTINCT: distinct}),
    )


def _seconds(time: StepTime, samples: Iterable[Sample], scores: Iterable[Score]) -> Seconds:
    scored: defaultdict[str, float] = defaultdict(float)
    for score in scores:
        scored[score.stage] += score.seconds
    return Seconds(
        generation=sum(sample.seconds for sample in samples),
        reward=scored["reward"],
        reference=scored["reference"],
        critic=scored["critic"],
        training=max(time.worked - time.checkpoint, 0.0),
        checkpoint=time.checkpoint,
        waiting=max(time.passed - time.worked, 0.0),
        step=time.passed,
    )


def _accepted(samples: Sequence[Sample]) -> float | None:
    verifications = sum(sample.num_verifications for sample in samples)
    if not verifications or not any(sample.num_drafted for sample in samples):
        return None
    return sum(sample.num_accepted for sample in samples) / verifications


def _strategies(samples: Iterable[Sample]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for sample in samples:
        counts.update(dict(sample.strategies))
    return dict(sorted(counts.items()))


def _expert_rows(samples: Iterable[Sample]) -> dict[str, tuple[int, ...]]:
    rows: dict[str, tuple[int, ...]] = {}
    for layer, counts in (told for sample in samples for told in sample.experts):
        before = rows.get(layer, (0,) * len(counts))
        rows[layer] = tuple(a + b for a, b in zip(before, counts, strict=True))
    return dict(sorted(rows.items()))
