"""Results of `rlhfspec bench rebalance`: stages, and ratios with their intervals."""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhfspec.bench.generating.results import BenchResults
from rlhfspec.bench.moving.rebalancing.arms import CLAIRVOYANT, DEALT, OURS, PULLED
from rlhfspec.bench.moving.rebalancing.prediction import IDEAL, MeasuredCurve
from rlhfspec.bench.moving.rebalancing.workloads import GROUPS, SKEW
from rlhfspec.bench.ratios import Ratio, against_best, paired

_NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    arm: str
    seconds: float
    ends: tuple[float, ...]  # by generator, seconds since the start
    active: tuple[tuple[tuple[float, int], ...], ...] = ()  # by generator: (second, running)
    moves: tuple[tuple[float, int, int], ...] = ()  # carried out: (second, from, to)
    kept: tuple[str, ...] = ()  # why others were not


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    workload: str
    decoding: str
    seed: int
    num_tokens: int
    imbalance: float
    predicted: dict[str, float]  # seconds by the measured curve, of arms and ideal sharing
    runs: dict[str, tuple[StageRun, ...]]
    digest: str  # of tokens and log-probs, the same in every run

    def seconds(self, arm: str) -> list[float]:
        return [run.seconds for run in self.runs.get(arm, ())]

    def median(self, arm: str) -> float | None:
        return statistics.median(found) if (found := self.seconds(arm)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Results of a workload and decoding mode over all seeds. A ratio is None if it needs an arm that did not run."""

    workload: str
    decoding: str
    seconds: dict[str, float]  # of each arm, means over seeds of medians; `ideal` by the curve
    imbalance: tuple[float, float]  # least and most: tokens of the fuller half over the other's
    moves_per_sequence: float
    dealt_to_ours: Ratio | None
    closed: Ratio | None  # (dealt - ours) / (dealt - clairvoyant)
    harm: Ratio | None  # ours / the better of dealt and pulled
    to_clairvoyant: Ratio | None  # ours / clairvoyant
    prediction_errors: dict[str, float]  # predicted / found - 1, means over seeds

    @classmethod
    def of(cls, stages: Sequence[StageResult]) -> Row:
        times = {arm: [s for stage in stages for s in stage.seconds(arm)] for arm in stages[0].runs}
        medians = {arm: statistics.fmean(stage.median(arm) or 0.0 for stage in stages) for arm in times}
        ideal = [stage.predicted[IDEAL] for stage in stages if IDEAL in stage.predicted]
        ours = [run for stage in stages for run in stage.runs.get(OURS, ())]
        return cls(
            workload=stages[0].workload,
            decoding=stages[0].decoding,
            seconds=medians | ({IDEAL: statistics.fmean(ideal)} if ideal else {}),
            imbalance=(min(stage.imbalance for stage in stages), max(stage.imbalance for stage in stages)),
            moves_per_sequence=sum(len(run.moves) for run in ours) / max(64 * len(ours), 1),
            dealt_to_ours=paired(times[DEALT], times[OURS]) if {DEALT, OURS} <= set(times) else None,
            closed=share_closed(times) if {DEALT, OURS, CLAIRVOYANT} <= set(times) else None,
            harm=_harm(times) if {DEALT, PULLED, OURS} <= set(times) else None,
            to_clairvoyant=paired(times[OURS], times[CLAIRVOYANT]) if {OURS, CLAIRVOYANT} <= set(times) else None,
            prediction_errors=_prediction_errors(stages),
        )

    @property
    def should_gain(self) -> bool:
        """Return whether moves are required to save time, because the stage is compute-bound and unequal."""
        return self.decoding == "adaptive" and self.workload in (SKEW, GROUPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceResults(BenchResults):
    curves: dict[str, MeasuredCurve]  # by decoding; a token of each of B sequences, while the neighbour runs
    stages: tuple[StageResult, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        kinds = dict.fromkeys((stage.decoding, stage.workload) for stage in self.stages)
        return tuple(
            Row.of([stage for stage in self.stages if (stage.decoding, stage.workload) == kind]) for kind in kinds
        )

    def content(self) -> dict[str, Any]:
        return asdict(self) | {"rows": [asdict(row) for row in self.rows]}


def share_closed(times: dict[str, list[float]]) -> Ratio:
    """Return (dealt - ours) / (dealt - clairvoyant) of the seconds, with its interval from resampled repetitions."""
    pairs = list(zip(times[DEALT], times[OURS], times[CLAIRVOYANT], strict=True))

    def share(chosen: Iterable[tuple[float, float, float]]) -> float:
        chosen = list(chosen)
        possible = sum(dealt - best for dealt, _, best in chosen)
        return sum(dealt - ours for dealt, ours, _ in chosen) / possible if possible else 0.0

    dice = random.Random(0)
    shares = sorted(share(dice.choices(pairs, k=len(pairs))) for _ in range(_NUM_RESAMPLES))
    low, high = shares[round(0.025 * _NUM_RESAMPLES)], shares[round(0.975 * _NUM_RESAMPLES) - 1]
    return Ratio(value=share(pairs), low=low, high=high)


def digest_of(digests: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


def _harm(times: dict[str, list[float]]) -> Ratio:
    """Return the seconds of `ours` over those of the faster of dealt and pulled, chosen on the other repetitions."""
    speeds = {arm: [1 / seconds for seconds in times[arm]] for arm in (DEALT, PULLED, OURS)}
    found = against_best(speeds[OURS], {arm: speeds[arm] for arm in (DEALT, PULLED)})
    return Ratio(value=1 / found.value, low=1 / found.high, high=1 / found.low, against=found.against)


def _prediction_errors(stages: Sequence[StageResult]) -> dict[str, float]:
    errors: dict[str, list[float]] = {}
    for stage in stages:
        for arm, seconds in stage.predicted.items():
            if found := stage.median(arm):
                errors.setdefault(arm, []).append(seconds / found - 1)
    return {arm: statistics.fmean(each) for arm, each in errors.items()}
