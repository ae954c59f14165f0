"""Writes down what was trained: the run folder's lines, the trackers, the checkpoints."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from rlhfspec.checkpoint import CheckpointStore
from rlhfspec.job import RLHFJob
from rlhfspec.records import Load, Sample
from rlhfspec.service.vitals import Vitals
from rlhfspec.telemetry.metrics import Lengths, Seconds, Spread, StepMetrics, learner_fields
from rlhfspec.telemetry.run_folder import RunFolder
from rlhfspec.telemetry.trackers import Trackers
from rlhfspec.trainer.service import Trained


class RunRecorder:
    """Implements rlhfspec.trainer.service.Recorder. `load` is fed by whoever hears the generators."""

    def __init__(
        self, job: RLHFJob, folder: RunFolder, checkpoints: CheckpointStore, trackers: Trackers, vitals: Vitals
    ) -> None:
        self._job = job
        self._folder = folder
        self._checkpoints = checkpoints
        self._trackers = trackers
        self._stopwatch = Stopwatch(vitals)
        self._strategies: Counter[str] = Counter()
        self._experts: dict[str, tuple[int, ...]] = {}
        self._lap = self._stopwatch.lap()

    def load(self, load: Load) -> None:
        self._strategies[load.strategy] += 1
        for layer, rows in load.experts:
            before = self._experts.get(layer, (0,) * len(rows))
            self._experts[layer] = tuple(a + b for a, b in zip(before, rows, strict=True))

    def learnt(self) -> None:
        self._lap = self._stopwatch.lap()

    def record(self, trained: Trained) -> str:
        self._folder.append_samples(trained.chosen.all_samples, trained.chosen.rewards)
        seconds, began = self._lap
        metrics = step_metrics(self._job, trained, seconds, began, dict(self._strategies), dict(self._experts))
        self._strategies.clear()
        self._experts.clear()
        self._folder.append_step(metrics)
        self._trackers.step(metrics)
        return metrics.to_line()

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        began = time.monotonic()
        self._checkpoints.save(step, {"learner": state})
        self._stopwatch.checkpoint_seconds += time.monotonic() - began


class Stopwatch:
    """How long each stage worked since the last lap. Writing a step down, checkpoint and all, counts for the next."""

    def __init__(self, vitals: Vitals) -> None:
        self.checkpoint_seconds = 0.0
        self._vitals = vitals
        self._began, self._began_unix = time.monotonic(), time.time()
        self._busy = self._busy_seconds()

    def lap(self) -> tuple[Seconds, float]:
        """The seconds, and when the lap began."""
        now, now_unix, busy = time.monotonic(), time.time(), self._busy_seconds()
        passed = now - self._began
        worked = {stage: busy[stage] - self._busy.get(stage, 0.0) for stage in busy}
        training = max(worked.get("trainer", 0.0) - self.checkpoint_seconds, 0.0)
        seconds = Seconds(
            generation=worked.get("generator", 0.0),
            reward=worked.get("reward", 0.0),
            reference=worked.get("reference", 0.0),
            critic=worked.get("critic", 0.0),
            training=training,
            checkpoint=self.checkpoint_seconds,
            waiting=max(passed - worked.get("trainer", 0.0), 0.0),
            step=passed,
        )
        began = self._began_unix
        self._began, self._began_unix, self._busy, self.checkpoint_seconds = now, now_unix, busy, 0.0
        return seconds, began

    def _busy_seconds(self) -> dict[str, float]:
        busy: defaultdict[str, float] = defaultdict(float)
        for state in self._vitals.snapshot():
            busy[state.stage] += state.busy_seconds
        return busy


def step_metrics(
    job: RLHFJob,
    trained: Trained,
    seconds: Seconds,
    began_unix: float,
    strategies: dict[str, int],
    experts: dict[str, tuple[int, ...]],
) -> StepMetrics:
    """Pure: a step's line from what was trained and how long it took."""
    samples = trained.chosen.samples
    num_generated = sum(len(sample.token_ids) for sample in trained.chosen.all_samples)
    lengths = [len(sample.token_ids) for sample in samples]
    return StepMetrics(
        step=trained.step,
        weights_version=trained.report.version,
        weights_digest=trained.weights_digest,
        num_samples=len(samples),
        num_dropped=trained.chosen.num_dropped,
        num_prompts=len({sample.group_id for sample in samples}),
        reward=Spread.of(trained.rollouts.rewards.tolist()),
        reward_components={name: float(v.mean()) for name, v in trained.rollouts.reward_components.items()},
        advantage=Spread.of(trained.report.advantages.tolist()),
        response_length=Lengths.of(lengths, max_tokens=job.spec.generation.max_tokens),
        num_response_tokens=trained.rollouts.num_tokens,
        tokens_per_second=num_generated / seconds.generation if seconds.generation > 0 else 0.0,
        accepted_per_verification=_accepted(trained.chosen.all_samples),
        strategy=strategies,
        expert_rows=experts,
        seconds=seconds,
        started_unix_seconds=began_unix,
        finished_unix_seconds=began_unix + seconds.step,
        **learner_fields(trained.report.metrics),
    )


def _accepted(samples: Sequence[Sample]) -> float | None:
    verifications = sum(sample.num_verifications for sample in samples)
    if not verifications or not any(sample.num_drafted for sample in samples):
        return None
    return sum(sample.num_accepted for sample in samples) / verifications
