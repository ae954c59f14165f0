"""Evaluations on a held-out split: the lines of `evaluations.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import ConfigDict

from rlhfspec.messages.records.metrics import Lengths, Spread, json_line, parse_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    step: int  # the step it follows; 0: before training
    weights_version: int
    num_samples: int  # that were scored
    num_failed: int  # not scored, and not counted elsewhere
    reward: Spread
    reward_components: Mapping[str, float]  # mean of each source, unweighted
    response_length: Lengths
    truncated_fraction: float  # of responses that reached maxTokens
    seconds: float  # the trainer waited for it
    reward_by_column: Mapping[str, float] = field(default_factory=dict)  # mean by value of observability.byColumn
    num_by_column: Mapping[str, float] = field(default_factory=dict)  # samples by value of it
    different_answers: float | None = None  # effective number of different whole responses
    expected_answers: float | None = None  # the same of the data's column `answer`; null without it

    __pydantic_config__ = ConfigDict(extra="forbid")

    def to_line(self) -> str:
        return json_line(self, f"evaluation after step {self.step}")

    @classmethod
    def from_line(cls, line: str) -> Evaluation:
        return parse_line(cls, line, "evaluations.jsonl")


def best(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Return the evaluation with the highest mean reward, the earliest among equals."""
    return max(evaluations, key=lambda evaluation: (evaluation.reward.mean, -evaluation.step))
