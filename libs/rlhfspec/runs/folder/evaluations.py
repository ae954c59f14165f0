"""How the policy does on a held-out split: a line of `evaluations.jsonl` for every evaluation, and which was the best.

Example:
    >>> runs = [example_evaluation(step=step, reward=reward) for step, reward in ((0, 0.25), (10, 0.75), (20, 0.5))]
    >>> Evaluation.from_line(runs[1].to_line()) == runs[1]
    True
    >>> best(runs).step
    10
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from pydantic import ConfigDict

from rlhfspec.errors import RolloutError
from rlhfspec.messages.records import Sample, Score
from rlhfspec.runs.folder.metrics import LengthHistogram, Spread, json_line, parse_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    step: int  # after which it was made; 0 is before training
    weights_version: int
    num_samples: int  # that were scored
    num_failed: int  # that were not, and count nowhere else
    reward: Spread
    reward_components: Mapping[str, float]  # mean of each source, unweighted
    response_length: LengthHistogram
    truncated_fraction: float  # of responses that reached maxTokens
    seconds: float  # that the trainer waited for it

    __pydantic_config__ = ConfigDict(extra="forbid")

    @classmethod
    def of(
        cls, step: int, version: int, samples: Sequence[Sample], rewards: Mapping[str, Score], *, max_tokens: int,
        seconds: float,
    ) -> Evaluation:  # fmt: skip
        """`rewards` by sample id. RolloutError when not one sample was scored."""
        scored = [
            (sample, rewards[sample.id])
            for sample in samples
            if not sample.error and sample.id in rewards and not rewards[sample.id].error
        ]
        if not scored:
            raise RolloutError(samples[0].id, f"and every other of the evaluation after step {step} has no reward")
        components = [dict(score.components) for _, score in scored]
        return cls(
            step=step,
            weights_version=version,
            num_samples=len(scored),
            num_failed=len(samples) - len(scored),
            reward=Spread.of([score.values[0] for _, score in scored]),
            reward_components={name: fmean(of[name] for of in components) for name in components[0]},
            response_length=LengthHistogram.of([len(sample.token_ids) for sample, _ in scored], max_tokens=max_tokens),
            truncated_fraction=fmean(sample.finish_reason == "length" for sample, _ in scored),
            seconds=seconds,
        )

    def to_line(self) -> str:
        return json_line(self, f"evaluation after step {self.step}")

    @classmethod
    def from_line(cls, line: str) -> Evaluation:
        return parse_line(cls, line, "evaluations.jsonl")


def best(evaluations: Sequence[Evaluation]) -> Evaluation:
    """The one with the highest mean reward; of equals the earliest."""
    return max(evaluations, key=lambda evaluation: (evaluation.reward.mean, -evaluation.step))


def example_evaluation(*, step: int = 1, reward: float = 0.5) -> Evaluation:
    """For examples and tests."""
    return Evaluation(
        step=step,
        weights_version=step,
        num_samples=4,
        num_failed=0,
        reward=Spread.of([reward - 0.25, reward, reward, reward + 0.25]),
        reward_components={"exact": reward},
        response_length=LengthHistogram.of([10, 20, 20, 60], max_tokens=64),
        truncated_fraction=0.0,
        seconds=1.5,
    )
