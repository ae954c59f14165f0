"""Speed ratios of modes, paired within repetitions and without bias to lucky modes.

Repetitions are interleaved, so noise slows all modes of one alike; ratios are taken within each, and their geometric
mean counts. The best of many strategies by its own measurements is partly the luckiest. It is therefore chosen on the
*other* repetitions, and judged on this one.

Example: two strategies that are lucky in turn.
    >>> ours, lucky, unlucky = (100.0, 100.0), (120.0, 80.0), (80.0, 120.0)
    >>> paired(ours, lucky).value < 1.03
    True
    >>> against_best(ours, {"a": lucky, "b": unlucky}).value > 1.2
    True
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_NUM_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Geometric mean over repetitions, with its 95 % interval from resampling them."""

    value: float
    low: float
    high: float
    against: str = ""  # of several, the one chosen most often

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


def paired(ours: Sequence[float], other: Sequence[float], *, against: str = "") -> Ratio:
    """Return ours / other over the repetitions that both have; `against` names `other` in the result."""
    logs = [math.log(a / b) for a, b in zip(ours, other, strict=False)]
    dice = random.Random(0)
    means = sorted(statistics.fmean(dice.choices(logs, k=len(logs))) for _ in range(_NUM_RESAMPLES))
    low, high = means[round(0.025 * _NUM_RESAMPLES)], means[round(0.975 * _NUM_RESAMPLES) - 1]
    return Ratio(value=math.exp(statistics.fmean(logs)), low=math.exp(low), high=math.exp(high), against=against)


def against_best(ours: Sequence[float], others: Mapping[str, Sequence[float]]) -> Ratio:
    """Return ours / the best of `others`, chosen for each repetition on the others (on itself if alone)."""
    size = min(len(ours), *(len(speeds) for speeds in others.values()))
    chosen = []
    for left_out in range(size):
        rest = [i for i in range(size) if i != left_out] or [left_out]
        chosen.append(max(others, key=lambda name: sum(math.log(others[name][i]) for i in rest)))
    best = [others[name][i] for i, name in enumerate(chosen)]
    return paired(ours, best, against=max(dict.fromkeys(chosen), key=chosen.count))
