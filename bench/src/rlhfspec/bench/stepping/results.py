"""Results of `rlhfspec bench step`.

Example:
    >>> steps = (Step(seconds=4.0, by_stage={"training": 1.0}, num_tokens=64),
    ...          Step(seconds=2.0, by_stage={"training": 1.5}, num_tokens=64))
    >>> row = StepRow.of("plain", steps)
    >>> row.seconds_per_step, row.by_stage
    (3.0, {'training': 1.25})
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rlhfspec.bench.generating.results import BenchResults

TRL, PLAIN_STEP, ADAPTIVE = "trl", "plain", "adaptive"
STEP_PARTS = ("generation", "reward", "reference", "critic", "training", "waiting")
TOLERATED_DIFFERENCE = 0.02  # of tokens a step between modes; more would compare different work


class UnequalWork(RuntimeError):
    """Raised when modes generated different amounts, so that times cannot be compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Measured step. Stages may overlap and add up to more than `seconds`."""

    seconds: float
    by_stage: dict[str, float]
    num_tokens: int
    peak_bytes: int = 0  # resident memory of the whole process at its peak


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """Medians over all steps of a mode; `steps` has the seconds of each."""

    mode: str
    seconds_per_step: float
    by_stage: dict[str, float]
    tokens_per_step: float
    steps: tuple[float, ...]
    peak_gigabytes: float  # of the largest process

    @classmethod
    def of(cls, mode: str, steps: Iterable[Step]) -> StepRow:
        steps = tuple(steps)
        names = [name for name in STEP_PARTS if any(name in step.by_stage for step in steps)]
        return cls(
            mode=mode,
            seconds_per_step=statistics.median(step.seconds for step in steps),
            by_stage={name: statistics.median(step.by_stage.get(name, 0.0) for step in steps) for name in names},
            tokens_per_step=statistics.fmean(step.num_tokens for step in steps),
            steps=tuple(step.seconds for step in steps),
            peak_gigabytes=max(step.peak_bytes for step in steps) / 1e9,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResults(BenchResults):
    rows: tuple[StepRow, ...]

    def row(self, mode: str) -> StepRow | None:
        return next((row for row in self.rows if row.mode == mode), None)

    def times_as_fast(self, mode: str, rival: str = TRL) -> float | None:
        """Return the seconds per step of `rival` over those of `mode`, or None if either did not run."""
        ours, theirs = self.row(mode), self.row(rival)
        return theirs.seconds_per_step / ours.seconds_per_step if ours and theirs else None

    def content(self) -> dict[str, Any]:
        ratios = {mode: self.times_as_fast(mode) for mode in (PLAIN_STEP, ADAPTIVE)}
        return asdict(self) | {"times_as_fast_as_trl": ratios}


def check_equal_work(rows: Iterable[StepRow]) -> None:
    """Raise UnequalWork when tokens per step differ by more than is tolerated.

    >>> check_equal_work([StepRow.of("plain", [Step(seconds=1.0, by_stage={}, num_tokens=100)])])
    """
    tokens = {row.mode: row.tokens_per_step for row in rows}
    if tokens and max(tokens.values()) > (1 + TOLERATED_DIFFERENCE) * min(tokens.values()):
        told = ", ".join(f"{mode} {count:.0f}" for mode, count in tokens.items())
        raise UnequalWork(f"tokens a step differ by more than {TOLERATED_DIFFERENCE:.0%}: {told}")
