"""Expected remaining length of a sequence: mean residual life by Kaplan-Meier of recent lengths.

Lengths are relative to their prompt's `factor`; truncated responses are censored observations.
"""

from __future__ import annotations

import numpy as np

from rlhfspec.common.arrays import BoolArray, Floats
from rlhfspec.moves.rebalancing.fleet import Numbers

_KEPT_LENGTHS = 4096  # recent lengths
_MIN_LENGTHS = 8  # lengths; with fewer, half of the limit is expected to remain
_PER_OCTAVE = 16  # table rows per doubling of the generated length
_OCTAVES = 20


class Residual:
    """Estimator of remaining tokens: half of the limit until it has learnt some lengths."""

    def __init__(self) -> None:
        self._lengths = np.zeros(_KEPT_LENGTHS)
        self._is_censored = np.zeros(_KEPT_LENGTHS, bool)
        self._num_learnt = 0
        self._table: Floats | None = None

    @property
    def num_learnt(self) -> int:
        return self._num_learnt

    def learn(self, length: int, *, is_censored: bool = False, factor: float = 1.0) -> None:
        """Learn the length of a finished response, censored if truncated; `factor`: its prompt's length factor."""
        place = self._num_learnt % _KEPT_LENGTHS
        self._lengths[place], self._is_censored[place] = max(length, 1) / factor, is_censored
        self._num_learnt += 1
        self._table = None

    def remaining(self, generated: Numbers, factor: Numbers, limit: Numbers) -> Floats:
        most = np.asarray(limit, np.float64)
        if self._num_learnt < _MIN_LENGTHS:
            return np.asarray(np.maximum(most / 2, 1.0))
        if self._table is None:
            count = min(self._num_learnt, _KEPT_LENGTHS)
            self._table = _table(self._lengths[:count], self._is_censored[:count])
        factors = np.asarray(factor, np.float64)
        rows = np.log2(np.asarray(generated, np.float64) / factors + 1.0) * _PER_OCTAVE
        tokens: Floats = np.interp(rows, np.arange(len(self._table)), self._table) * factors
        return np.asarray(np.maximum(np.minimum(tokens, most), 1.0))


def _table(lengths: Floats, is_censored: BoolArray) -> Floats:
    elapsed = np.exp2(np.arange(_PER_OCTAVE * _OCTAVES + 1) / _PER_OCTAVE) - 1.0
    return mean_residual_life(lengths, is_censored, elapsed)


def mean_residual_life(lengths: Floats, is_censored: BoolArray, elapsed: Floats) -> Floats:
    """Return mean remaining lengths after `elapsed` ones; beyond the longest observed, a tenth of `elapsed`.

    >>> mean_residual_life(np.array([1.0, 3.0, 5.0]), np.zeros(3, bool), np.array([0.0, 2.0, 20.0])).round(6).tolist()
    [3.0, 2.0, 2.0]
    """
    order = np.lexsort((is_censored, lengths))  # ends sort before censored lengths of the same value
    lengths, is_end = lengths[order], ~is_censored[order]
    at_risk = np.arange(len(lengths), 0, -1)
    survival = np.concatenate(([1.0], np.cumprod(1.0 - is_end / at_risk)))  # after each length
    edges = np.concatenate(([0.0], lengths))
    tail = survival[-1] * edges[-1] * 0.1  # of sequences never seen to end
    areas = np.diff(edges) * survival[:-1]
    # [L + 1]: the area under the survival curve from each edge on
    beyond = np.concatenate((np.cumsum(areas[::-1])[::-1], [0.0])) + tail
    place = np.searchsorted(edges, elapsed, side="right") - 1  # the last edge at or before it
    here = survival[place]
    area = beyond[place] - (elapsed - edges[place]) * here
    is_beyond = (elapsed >= edges[-1]) | (here <= 1e-12)
    known = area / np.where(is_beyond, 1.0, here)
    return np.asarray(np.where(is_beyond, elapsed * 0.1, known))
