"""What `rlhfspec bench rebalance` found: ratios with their intervals, how much of the gap was closed, and the bars.

Example: moves took a stage from 6 s to 4.5, where one who knew all lengths took 4.
    >>> run = lambda arm, seconds: StageRun(arm=arm, seconds=seconds, ends=(seconds, 1.0))
    >>> runs = {"dealt": (run("dealt", 6.0),), "ours": (run("ours", 4.5),), "clairvoyant": (run("clairvoyant", 4.0),)}
    >>> stage = StageResult(workload="skew", decoding="adaptive", seed=1, num_tokens=9, imbalance=4.0,
    ...                     predicted={}, runs=runs, digest="")
    >>> row = Row.of([stage])
    >>> str(row.dealt_to_ours), str(row.closed)
    ('1.33 (1.33-1.33)', '0.75 (0.75-0.75)')
    >>> [(bar.name, bar.holds) for bar in bars([row])]
    [('dealt / ours', True), ('share of dealt - clairvoyant closed', True)]
"""

from __future__ import annotations

import hashlib
import json
import random
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlhfspec.bench.moving.arms import CLAIRVOYANT, DEALT, OURS, PULLED
from rlhfspec.bench.moving.prediction import IDEAL, MeasuredCurve
from rlhfspec.bench.moving.workloads import GROUPS, SKEW
from rlhfspec.bench.processor import Processor
from rlhfspec.bench.ratios import Ratio, against_best, paired
from rlhfspec.bench.results import Bar

LEAST_GAIN, LEAST_CLOSED, MOST_HARM = 1.25, 0.65, 1.03
_NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRun:
    """One arm, once. ends: of each generator, seconds since the start. active: of each, (second, running) in time.
    moves: (second, from, to) of each that was carried out. kept: why others were not."""

    arm: str
    seconds: float
    ends: tuple[float, ...]
    active: tuple[tuple[tuple[float, int], ...], ...] = ()
    moves: tuple[tuple[float, int, int], ...] = ()
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """All arms of one stage, repetition after repetition. predicted: seconds by the measured curve, of arms and of
    ideal sharing. digest: of tokens and log-probs, the same in every run."""

    workload: str
    decoding: str
    seed: int
    num_tokens: int
    imbalance: float
    predicted: dict[str, float]
    runs: dict[str, tuple[StageRun, ...]]
    digest: str

    def seconds(self, arm: str) -> list[float]:
        return [run.seconds for run in self.runs.get(arm, ())]

    def median(self, arm: str) -> float | None:
        return statistics.median(found) if (found := self.seconds(arm)) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """All seeds of a workload under one way of decoding. A ratio that needs an arm that did not run is None."""

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
        """Work-bound and unequal: where moves must pay. Everywhere else they must do no harm."""
        return self.decoding == "adaptive" and self.workload in (SKEW, GROUPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceResults:
    machine: Processor
    settings: dict[str, Any]
    curves: dict[str, MeasuredCurve]  # by decoding; a token of each of B sequences, while the neighbour runs
    stages: tuple[StageResult, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        kinds = dict.fromkeys((stage.decoding, stage.workload) for stage in self.stages)
        return tuple(
            Row.of([stage for stage in self.stages if (stage.decoding, stage.workload) == kind]) for kind in kinds
        )

    def to_json(self) -> str:
        rows = self.rows
        return json.dumps(
            asdict(self) | {"rows": [asdict(row) for row in rows], "bars": [asdict(bar) for bar in bars(rows)]}
        )


def share_closed(times: dict[str, list[float]]) -> Ratio:
    """Of all seconds that a clairvoyant would have saved, those that moves saved; resampling the repetitions."""
    pairs = list(zip(times[DEALT], times[OURS], times[CLAIRVOYANT], strict=True))

    def share(chosen: Iterable[tuple[float, float, float]]) -> float:
        chosen = list(chosen)
        possible = sum(dealt - best for dealt, _, best in chosen)
        return sum(dealt - ours for dealt, ours, _ in chosen) / possible if possible else 0.0

    dice = random.Random(0)
    shares = sorted(share(dice.choices(pairs, k=len(pairs))) for _ in range(_NUM_RESAMPLES))
    low, high = shares[round(0.025 * _NUM_RESAMPLES)], shares[round(0.975 * _NUM_RESAMPLES) - 1]
    return Ratio(value=share(pairs), low=low, high=high)


def bars(rows: Iterable[Row]) -> list[Bar]:
    found = []
    for row in rows:
        at_least = {"dealt / ours": (row.dealt_to_ours, LEAST_GAIN),
                    "share of dealt - clairvoyant closed": (row.closed, LEAST_CLOSED)}  # fmt: skip
        if row.should_gain:
            found += [_bar(row, name, ratio, f">= {wanted:g}", ratio.value >= wanted)
                      for name, (ratio, wanted) in at_least.items() if ratio]  # fmt: skip
        elif row.harm:
            name = "ours / the better of dealt and pulled"
            found.append(_bar(row, name, row.harm, f"<= {MOST_HARM:g}", row.harm.value <= MOST_HARM))
    return found


def digest_of(digests: Iterable[str]) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]


def _bar(row: Row, name: str, ratio: Ratio, wanted: str, holds: bool) -> Bar:
    scenario = f"{row.decoding}, {row.workload}"
    return Bar(num_threads=1, scenario=scenario, name=name, wanted=wanted, found=str(ratio), holds=holds)


def _harm(times: dict[str, list[float]]) -> Ratio:
    """Which of the two is better is decided for each repetition on the others, so luck is not picked afterwards."""
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
