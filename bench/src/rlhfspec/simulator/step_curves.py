"""Step times by number of sequences B, for the simulator. `moves/rebalancing/curve.py` has the online estimates.

A curve is `t0 + c*B` or a table of points joined by straight lines. Engines of one host share memory bandwidth, so a
curve has two extremes: alone, and with all neighbours busy.

Example:
    >>> curve = StepCurve.affine(step_seconds=0.008, sequence_seconds=0.0005)
    >>> round(curve.seconds(16), 9)
    0.016
    >>> round(PRESETS["plain"].seconds(8) * 1e3, 2), round(PRESETS["plain"].seconds(8, busy_share=1.0) * 1e3, 2)
    (8.35, 10.26)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfspec.common.arrays import Floats
from rlhfspec.errors import InvalidRequest, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """Seconds of a step in which B sequences get one token each, given for every B in `num_sequences`."""

    name: str
    num_sequences: tuple[int, ...]
    alone: tuple[float, ...]
    busy: tuple[float, ...]  # while every other engine of the host works

    @classmethod
    def affine(cls, *, step_seconds: float, sequence_seconds: float, name: str = "affine") -> StepCurve:
        points = (1, 2)
        seconds = tuple(step_seconds + sequence_seconds * count for count in points)
        return cls(name=name, num_sequences=points, alone=seconds, busy=seconds)

    @classmethod
    def measured(cls, name: str, rates: dict[int, tuple[float, float]]) -> StepCurve:
        """Create a curve from `rates`: tokens per second with neighbours (idle, busy), by number of sequences."""
        points = tuple(sorted(rates))
        alone = tuple(count / rates[count][0] for count in points)
        busy = tuple(count / rates[count][1] for count in points)
        return cls(name=name, num_sequences=points, alone=alone, busy=busy)

    def seconds(self, count: int, *, busy_share: float = 0.0) -> float:
        return float(self.table(count, busy_share=busy_share)[count])

    def table(self, most: int, *, busy_share: float = 0.0) -> Floats:
        """Return [most + 1]: seconds of a step by number of sequences, with `busy_share` of the neighbours busy."""
        counts = np.arange(most + 1)
        mixed = (1.0 - busy_share) * np.array(self.alone) + busy_share * np.array(self.busy)
        seconds = np.interp(counts, self.num_sequences, mixed)
        points = self.num_sequences
        if len(points) > 1:  # extrapolate the last line
            slope = (mixed[-1] - mixed[-2]) / (points[-1] - points[-2])
            beyond = counts > points[-1]
            seconds[beyond] = mixed[-1] + slope * (counts[beyond] - points[-1])
        seconds[0] = 0.0
        return np.asarray(seconds, dtype=np.float64)

    def fitted(self, most: int, *, busy_share: float = 0.0) -> tuple[float, float]:
        """Return nonnegative seconds (t0, c) of t0 + c*B with the least relative errors up to `most` sequences."""
        counts = np.unique(np.geomspace(1, max(most, 2), 24).astype(np.int64))
        seconds = self.table(int(counts[-1]), busy_share=busy_share)[counts]
        design = np.stack([1.0 / seconds, counts / seconds], axis=1)
        (t0, c), *_ = np.linalg.lstsq(design, np.ones(len(counts)), rcond=None)
        if t0 < 0:
            return 0.0, float(np.median(seconds / counts))
        return float(t0), max(float(c), 0.0)


# tokens/s of one engine, (the other of its host asleep, busy), by sequences: a 77M model in bfloat16, one thread an
# engine on two shared cores of an AMD Zen 5
_PLAIN: dict[int, tuple[float, float]] = {
    1: (151, 97), 2: (304, 193), 4: (555, 386), 8: (958, 780), 16: (1402, 1235), 32: (1729, 1510), 64: (1791, 1796),
}  # fmt: skip
_ADAPTIVE: dict[int, tuple[float, float]] = {
    1: (950, 900), 2: (1329, 1136), 4: (1454, 1496), 8: (1697, 1562), 16: (1851, 1789), 32: (2119, 1942),
    64: (2115, 1880),
}  # fmt: skip

PRESETS = {
    "plain": StepCurve.measured("plain", _PLAIN),
    "adaptive": StepCurve.measured("adaptive", _ADAPTIVE),
    "t0=32c": StepCurve.affine(name="t0=32c", step_seconds=16e-3, sequence_seconds=0.5e-3),
    "t0=2.5c": StepCurve.affine(name="t0=2.5c", step_seconds=1.25e-3, sequence_seconds=0.5e-3),
    "memory-bound": StepCurve.affine(name="memory-bound", step_seconds=16e-3, sequence_seconds=0.5e-6),
}


def curve_named(text: str) -> StepCurve:
    """Return one of `PRESETS`, or the curve T0 + C*B given as `T0,C` in milliseconds.

    >>> round(curve_named("8.8,0.37").seconds(10), 9)
    0.0125
    """
    if text in PRESETS:
        return PRESETS[text]
    try:
        t0, c = (float(part) for part in text.split(","))
    except ValueError:
        reason = f"must be one of {', '.join(PRESETS)}, or T0,C in milliseconds{did_you_mean(text, PRESETS)}"
        raise InvalidRequest("curve", text, reason) from None
    if not (t0 >= 0 and c >= 0 and 0 < t0 + c < np.inf):
        raise InvalidRequest("curve", text, "T0 and C must be >= 0 milliseconds, and one of them more")
    return StepCurve.affine(name=f"{t0:g} + {c:g} B ms", step_seconds=t0 * 1e-3, sequence_seconds=c * 1e-3)
