"""What has arrived of one step, what is still missing, and what is trained on. Pure; arrival order leaves no trace.

Example: two prompts with two samples each; the second prompt's rewards are all equal, so a third prompt is demanded.
    >>> shape = StepShape(job="sums", step=1, num_prompts=2, samples_per_prompt=2, stages=("reward",), max_demands=1)
    >>> collector = Collector(shape)
    >>> collector.waits_for()
    '4 samples and 4 reward scores of step 1'
    >>> for prompt, rewards in ((0, (0.0, 1.0)), (1, (1.0, 1.0))):
    ...     for replica, reward in enumerate(rewards):
    ...         collector.add_sample(example_sample(prompt, replica))
    ...         collector.add_score(example_score(prompt, replica, reward))
    >>> collector.is_complete, collector.demand()
    (True, Demand(id='sums/1/demand/1', job='sums', step=1, round=1, num_prompts=1))
    >>> collector.is_complete, collector.waits_for()
    (False, '2 samples and 2 reward scores of step 1')
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlhfspec.errors import NumericalError, RolloutError
from rlhfspec.records import Demand, Sample, Score, ScoringStage, sample_id


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step is made of. `max_demands` 0: every prompt is used, whatever its rewards (no dynamic sampling)."""

    job: str
    step: int
    num_prompts: int
    samples_per_prompt: int
    stages: tuple[ScoringStage, ...]
    max_demands: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What a step is trained on, in id order, and everything that was generated for it."""

    samples: tuple[Sample, ...]
    scores: tuple[Score, ...]
    num_dropped: int  # of all: failed rewards, and groups that dynamic sampling left out
    all_samples: tuple[Sample, ...]
    rewards: dict[str, Score]  # of all, by sample id


class Collector:
    """Fed with whatever arrives for its step."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self._samples: dict[str, Sample] = {}
        self._scores: dict[tuple[str, ScoringStage], Score] = {}
        self._num_scores: Counter[ScoringStage] = Counter()
        self._num_prompts = shape.num_prompts
        self._round = 0

    def add_sample(self, sample: Sample) -> None:
        """A second arrival of the same sample changes nothing: by the law it is the same."""
        if sample.finish_reason == "error":
            raise NumericalError(f"sample {sample.id} was not generated: {sample.error}")
        self._samples[sample.id] = sample

    def add_score(self, score: Score) -> None:
        key = (score.sample_id, score.stage)
        self._num_scores[score.stage] += key not in self._scores
        self._scores[key] = score

    @property
    def num_expected(self) -> int:
        return self._num_prompts * self.shape.samples_per_prompt

    @property
    def is_complete(self) -> bool:
        return not self._missing()

    def waits_for(self) -> str:
        parts = [f"{count} {what}{'s' if count > 1 else ''}" for what, count in self._missing().items()]
        return f"{' and '.join(parts) or 'nothing'} of step {self.shape.step}"

    def demand(self) -> Demand | None:
        """More prompts, if this complete step has too few whose rewards differ and may still ask."""
        assert self.is_complete
        shape, missing = self.shape, self.shape.num_prompts - len(self._informative())
        if missing <= 0 or self._round >= shape.max_demands:
            return None
        self._round += 1
        self._num_prompts += missing
        return Demand(
            id=f"{shape.job}/{shape.step}/demand/{self._round}",
            job=shape.job,
            step=shape.step,
            round=self._round,
            num_prompts=missing,
        )

    def chosen(self) -> Chosen:
        """The first groups in id order: with dynamic sampling those whose rewards differ, as long as there are any."""
        assert self.is_complete
        groups = self._usable_groups()
        wanted = self._informative() or list(groups) if self.shape.max_demands else list(groups)
        samples = [sample for name in wanted[: self.shape.num_prompts] for sample in groups[name]]
        if not samples:
            raise RolloutError(f"{self.shape.job}/{self.shape.step}/*", f"all were dropped; {self._first_error()}")
        every = tuple(self._ordered())
        return Chosen(
            samples=tuple(samples),
            scores=tuple(self._scores[sample.id, stage] for sample in samples for stage in self.shape.stages),
            num_dropped=len(every) - len(samples),
            all_samples=every,
            rewards={sample.id: self._scores[sample.id, "reward"] for sample in every},
        )

    def _first_error(self) -> str:
        failed = (self._scores[sample.id, stage] for sample in self._ordered() for stage in self.shape.stages)
        return next((f"the first, {score.sample_id}: {score.error}" for score in failed if score.error), "none failed")

    def _ordered(self) -> list[Sample]:
        return sorted(self._samples.values(), key=lambda sample: sample.sort_key)

    def _missing(self) -> Counter[str]:
        expected = self.num_expected
        wanted = {"sample": expected - len(self._samples)}
        wanted |= {f"{stage} score": expected - self._num_scores[stage] for stage in self.shape.stages}
        return Counter({what: count for what, count in wanted.items() if count > 0})

    def _usable_groups(self) -> dict[str, list[Sample]]:
        """Samples that have their scores, by prompt, in id order."""
        groups: dict[str, list[Sample]] = {}
        for sample in self._ordered():
            if not any(self._scores[sample.id, stage].error for stage in self.shape.stages):
                groups.setdefault(sample.group_id, []).append(sample)
        return groups

    def _informative(self) -> list[str]:
        """Groups that teach something: their rewards differ."""
        return [
            name
            for name, samples in self._usable_groups().items()
            if len({self._scores[sample.id, "reward"].values[0] for sample in samples}) > 1
        ]


def example_sample(prompt: int, replica: int, *, step: int = 1, job: str = "sums") -> Sample:
    """For examples and tests."""
    return Sample(
        id=sample_id(job, step=step, prompt=prompt, replica=replica),
        job=job,
        step=step,
        prompt=prompt,
        replica=replica,
        prompt_text="2+2=",
        prompt_token_ids=(50, 43, 50, 61),
        columns_json="{}",
        text="4",
        token_ids=(52, 1),
        log_probs=(-0.5, -0.1),
        tempered_log_probs=(-0.5, -0.1),
        weights_versions=(step - 1, step - 1),
        finish_reason="stop",
    )


def example_score(prompt: int, replica: int, reward: float, *, step: int = 1, error: str = "") -> Score:
    """For examples and tests."""
    of = sample_id("sums", step=step, prompt=prompt, replica=replica)
    values = () if error else (reward,)
    return Score(id=f"{of}/reward", sample_id=of, job="sums", step=step, stage="reward", values=values, error=error)
