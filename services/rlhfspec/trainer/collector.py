"""Collection of a step's records: arrived, missing and chosen ones, independent of arrival order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlhfspec.errors import NumericalError, RolloutError
from rlhfspec.messages.records import Demand, Purpose, Sample, Score, ScoringStage


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Records that make up a step. `max_demands` 0: no dynamic sampling."""

    job: str
    step: int
    num_prompts: int
    samples_per_prompt: int
    stages: tuple[ScoringStage, ...]
    max_demands: int = 0
    purpose: Purpose = "training"

    def __str__(self) -> str:
        return f"step {self.step}" if self.purpose == "training" else f"the evaluation after step {self.step}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    samples: tuple[Sample, ...]
    scores: tuple[Score, ...]
    num_dropped: int  # of all: failed rewards, and groups that dynamic sampling left out
    all_samples: tuple[Sample, ...]
    all_scores: tuple[Score, ...]

    @property
    def rewards(self) -> dict[str, Score]:
        return {score.sample_id: score for score in self.all_scores if score.stage == "reward"}


class Collector:
    """Collector of one step's records. Samples of a demand count only after the demand was made."""

    def __init__(self, shape: StepShape) -> None:
        self.shape = shape
        self._samples: dict[str, Sample] = {}
        self._scores: dict[tuple[str, ScoringStage], Score] = {}
        self._asked = [shape.num_prompts]  # prompts, by round
        self._num_arrived: Counter[str] = Counter()  # of requested records

    def add_sample(self, sample: Sample) -> None:
        """Add a sample. The first of duplicates counts, because one version gives equal tokens."""
        if sample.finish_reason == "error":
            raise NumericalError(f"sample {sample.id} was not generated: {sample.error}")
        first = self._samples.setdefault(sample.id, sample)
        if first is sample:
            self._num_arrived["sample"] += self._is_asked_for(sample.id)
        elif len({*first.weights_versions, *sample.weights_versions}) == 1 and first.token_ids != sample.token_ids:
            raise RolloutError(sample.id, "arrived twice with different tokens from the same weights")

    def add_score(self, score: Score) -> None:
        if self._scores.setdefault((score.sample_id, score.stage), score) is score:
            self._num_arrived[f"{score.stage} score"] += self._is_asked_for(score.sample_id)

    @property
    def is_complete(self) -> bool:
        return not self._missing()

    def waits_for(self) -> str:
        parts = [f"{count} {what}{'s' if count > 1 else ''}" for what, count in self._missing().items()]
        return f"{' and '.join(parts) or 'nothing'} of {self.shape}"

    def demand(self) -> Demand | None:
        """Return a demand for prompts, or None if enough groups have differing rewards or no round is left."""
        assert self.is_complete
        shape, missing = self.shape, self.shape.num_prompts - len(self._informative())
        round = len(self._asked)
        if missing <= 0 or round > shape.max_demands:
            return None
        self._asked.append(missing)
        self._count_again()
        name = f"{shape.job}/{shape.step}/demand/{round}"
        return Demand(id=name, job=shape.job, step=shape.step, round=round, num_prompts=missing)

    def collected(self) -> Chosen:
        assert self.is_complete
        every = tuple(self._ordered())
        scores = tuple(self._scores_of(every))
        return Chosen(samples=every, scores=scores, num_dropped=0, all_samples=every, all_scores=scores)

    def chosen(self) -> Chosen:
        """Return the first groups in id order; with dynamic sampling those with differing rewards, if any."""
        assert self.is_complete
        groups = self._usable_groups()
        wanted = self._informative() or list(groups) if self.shape.max_demands else list(groups)
        samples = [sample for name in wanted[: self.shape.num_prompts] for sample in groups[name]]
        if not samples:
            raise RolloutError(f"{self.shape.job}/{self.shape.step}/*", f"all were dropped; {self._first_error()}")
        every = self._ordered()
        return Chosen(
            samples=tuple(samples),
            scores=tuple(self._scores_of(samples)),
            num_dropped=len(every) - len(samples),
            all_samples=tuple(every),
            all_scores=tuple(self._scores_of(every)),
        )

    def _scores_of(self, samples: Sequence[Sample]) -> list[Score]:
        return [self._scores[sample.id, stage] for sample in samples for stage in self.shape.stages]

    def _first_error(self) -> str:
        failed = (score for score in self._scores_of(self._ordered()) if score.error)
        return next((f"the first, {score.sample_id}: {score.error}" for score in failed), "none failed")

    def _ordered(self) -> list[Sample]:
        asked_for = (sample for sample in self._samples.values() if self._is_asked_for(sample.id))
        return sorted(asked_for, key=lambda sample: sample.sort_key)

    def _is_asked_for(self, sample_id: str) -> bool:
        """Return whether a sample belongs to the first round or a demanded one."""
        round, offset = divmod(int(sample_id.split("/")[-2]), self.shape.num_prompts)
        return round < len(self._asked) and offset < self._asked[round]

    def _count_again(self) -> None:
        self._num_arrived = Counter(
            ["sample" for name in self._samples if self._is_asked_for(name)]
            + [f"{stage} score" for name, stage in self._scores if self._is_asked_for(name)]
        )

    def _missing(self) -> dict[str, int]:
        names = ["sample", *(f"{stage} score" for stage in self.shape.stages)]
        num_expected = sum(self._asked) * self.shape.samples_per_prompt
        missing = {name: num_expected - self._num_arrived[name] for name in names}
        return {name: count for name, count in missing.items() if count > 0}

    def _usable_groups(self) -> dict[str, list[Sample]]:
        groups: dict[str, list[Sample]] = {}
        for sample in self._ordered():
            if not any(self._scores[sample.id, stage].error for stage in self.shape.stages):
                groups.setdefault(sample.group_id, []).append(sample)
        return groups

    def _informative(self) -> list[str]:
        return [
            name
            for name, samples in self._usable_groups().items()
            if len({self._scores[sample.id, "reward"].values[0] for sample in samples}) > 1
        ]
