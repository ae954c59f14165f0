"""Prediction of how likely the target accepts a drafted token.

Counts, with decay, by depth, rank and score gap (see `Forest`), plus a shift in log-odds per sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlhfspec.common.arrays import BoolArray, FloatArray, Floats, IntArray

Indices = npt.NDArray[np.int64]

_EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0)  # of the gap buckets
_CENTRES = np.array((0.1, 0.37, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 10.0, 16.0, 28.0))
_DEPTHS, _RANKS, _BUCKETS = 3, 4, len(_CENTRES)
_CELLS = _DEPTHS * _RANKS * _BUCKETS
_FINE, _FINE_PER_UNIT = 256, 8.0  # fine table of gaps, 1/8 apart, up to 32
_MOST_LOG_ODDS = 9.0  # at most .9999, so that a child is always strictly below its parent
_POOL_WEIGHT, _PRIOR_WEIGHT = 12.0, 6.0  # trials that other depths count for in a cell, and the prior in their pool
_LEAST_PRECISION, _MOST_PRECISION = 3.0, 24.0  # of a shift: within about +-1/2 at first, at most within +-1/5
_MEAN_RATE = 0.05  # share of one finished sequence in the shift that new ones start from
_TRIALS_AFTER_RESET = 50.0  # trials that a table counts for after the weights changed

_FINE_GAPS = np.arange(_FINE) / _FINE_PER_UNIT
_BUCKET_OF_FINE = np.searchsorted(_EDGES, _FINE_GAPS, side="right")
_INTERPOLATION = np.array([np.interp(_FINE_GAPS, _CENTRES, row) for row in np.eye(_BUCKETS)])  # [buckets, fine]


def _prior() -> Floats:
    best = 0.99 - 0.52 * np.exp(-0.75 * _CENTRES)
    return np.array([best, *((1.0 - best) * share for share in (0.75, 0.45, 0.3))])


@dataclass(frozen=True, slots=True)
class Decile:
    drafter: str
    tenth: int  # 9: from .9 to 1
    count: float
    predicted: float
    real: float


class _Book:
    def __init__(self, num_rows: int) -> None:
        self.trials, self.hits, self.accepted = np.zeros(_CELLS), np.zeros(_CELLS), np.zeros(_CELLS)
        self.deciles = np.zeros((3, 10))  # sums by decile of prediction: count, predicted, real
        self.mean_shift = 0.0
        self.shift = np.zeros(num_rows)
        self.precision = np.full(num_rows, _LEAST_PRECISION)
        self.rebuild()

    def rebuild(self) -> None:
        trials = self.trials.reshape(_DEPTHS, _RANKS, _BUCKETS)
        hits = self.hits.reshape(_DEPTHS, _RANKS, _BUCKETS)
        pool = (hits.sum(axis=0) + _PRIOR_WEIGHT * _prior()) / (trials.sum(axis=0) + _PRIOR_WEIGHT)
        chance = np.clip((hits + _POOL_WEIGHT * pool) / (trials + _POOL_WEIGHT), 1e-4, 1.0 - 1e-4)
        log_odds = np.log(chance / (1.0 - chance)).reshape(_DEPTHS * _RANKS, _BUCKETS)
        self.log_odds = (log_odds @ _INTERPOLATION).ravel()

    def count(self, cell: Indices, predicted: Floats, of_table: Floats, real: Floats, kept: float) -> None:
        self.trials = self.trials * kept + np.bincount(cell, minlength=_CELLS)
        self.hits = self.hits * kept + np.bincount(cell, real - predicted + of_table, _CELLS)
        self.accepted = self.accepted * kept + np.bincount(cell, real, _CELLS)
        tenth = (predicted * 10.0).astype(np.int64)
        self.deciles = self.deciles * kept + tuple(np.bincount(tenth, sums, 10) for sums in (None, predicted, real))

    def learn_shifts(self, rows: IntArray, surprise: Floats, predicted: Floats) -> None:
        information = np.bincount(rows, predicted * (1.0 - predicted), len(self.shift))
        touched = np.flatnonzero(information)
        precision = np.minimum(self.precision[touched] + information[touched], _MOST_PRECISION)
        step = np.bincount(rows, surprise, len(self.shift))[touched] / precision
        self.shift[touched] += np.clip(step, -1.0, 1.0)
        self.precision[touched] = precision

    def forget_counts(self) -> None:
        kept = min(1.0, _TRIALS_AFTER_RESET / max(float(self.trials.sum()), 1.0))
        self.trials *= kept
        self.hits *= kept
        self.accepted *= kept
        self.deciles[:] = 0.0
        self.mean_shift = 0.0
        self.shift[:] = 0.0
        self.precision[:] = _LEAST_PRECISION
        self.rebuild()

    def shift_of(self, rows: IntArray) -> Floats:
        missing = int(rows.max(initial=-1)) + 1 - len(self.shift)
        if missing > 0:  # an engine with more rows than announced
            self.shift = np.append(self.shift, np.full(missing, self.mean_shift))
            self.precision = np.append(self.precision, np.full(missing, _LEAST_PRECISION))
        return self.shift.take(rows)

    def forget(self, row: int) -> None:
        if row < len(self.shift):
            learnt = 1.0 - _LEAST_PRECISION / self.precision[row]  # 0: no evidence, towards 1: well known
            self.mean_shift += _MEAN_RATE * float(learnt * (self.shift[row] - self.mean_shift))
            self.shift[row], self.precision[row] = self.mean_shift, _LEAST_PRECISION


class AcceptanceModel:
    """Acceptance probabilities learnt from tested nodes, whose weight halves every `half_life` nodes."""

    def __init__(self, num_rows: int = 256, *, half_life: float = 6000.0) -> None:
        self._num_rows = num_rows
        self._half_life = half_life
        self._books: dict[str, _Book] = {}

    def predict(self, drafter: str, rows: IntArray, depth: IntArray, rank: IntArray, gap: FloatArray) -> FloatArray:
        log_odds, shift = self.curves(drafter, rows)
        group, fine = _group_and_fine(depth, rank, gap)
        return _chance(log_odds.take(group * _FINE + fine) + shift).astype(np.float32)

    def curves(self, drafter: str, rows: IntArray) -> tuple[Floats, Floats]:
        """Return the log-odds by depth, rank and gap (steps of 1/8), flattened, and the shift to add for each row."""
        book = self._book(drafter)
        return book.log_odds, book.shift_of(rows)

    def observe(
        self, drafter: str, rows: IntArray, depth: IntArray, rank: IntArray, gap: FloatArray, accepted: BoolArray
    ) -> None:
        """Learn from M nodes whose parents were accepted. A call has a fixed cost, so pass several steps at once."""
        if not len(rows):
            return
        book = self._book(drafter)
        group, fine = _group_and_fine(depth, rank, gap)
        log_odds = book.log_odds.take(group * _FINE + fine)
        predicted, of_table = _chance(log_odds + book.shift_of(rows)), _chance(log_odds)
        real = accepted.astype(np.float64)
        book.learn_shifts(rows, real - predicted, predicted)
        cell = group * _BUCKETS + _BUCKET_OF_FINE.take(fine)
        book.count(cell, predicted, of_table, real, kept=0.5 ** (len(rows) / self._half_life))
        book.rebuild()

    def forget(self, row: int) -> None:
        for book in self._books.values():
            book.forget(row)

    def learnt(self, row: int) -> tuple[tuple[str, float, float], ...]:
        """Return (drafter, shift in log-odds, its precision) learnt from a row's sequence."""
        books = ((name, book) for name, book in self._books.items() if row < len(book.shift))
        return tuple((name, float(book.shift[row]), float(book.precision[row])) for name, book in books)

    def take_over(self, row: int, learnt: Iterable[tuple[str, float, float]]) -> None:
        for drafter, shift, precision in learnt:
            book = self._book(drafter)
            book.shift_of(np.array([row], np.int32))
            book.shift[row], book.precision[row] = shift, precision

    def reset(self) -> None:
        for book in self._books.values():
            book.forget_counts()

    def by_depth(self, drafter: str) -> tuple[float, ...]:
        """Return the accepted share of verified best candidates, at depth 1, 2, and deeper."""
        book = self._book(drafter)
        shape = (_DEPTHS, _RANKS, _BUCKETS)
        trials, accepted = (counts.reshape(shape)[:, 0].sum(axis=1) for counts in (book.trials, book.accepted))
        return tuple((accepted[trials > 0.5] / trials[trials > 0.5]).tolist())

    def calibration(self) -> tuple[Decile, ...]:
        return tuple(
            Decile(name, tenth, count, predicted / count, real / count)
            for name, book in self._books.items()
            for tenth, (count, predicted, real) in enumerate(book.deciles.T.tolist())
            if count > 0.5
        )

    def calibration_error(self) -> float:
        deciles = self.calibration()
        total = sum(decile.count for decile in deciles)
        return sum(d.count * abs(d.predicted - d.real) for d in deciles) / total if total else 0.0

    def _book(self, drafter: str) -> _Book:
        if drafter not in self._books:
            self._books[drafter] = _Book(self._num_rows)
        return self._books[drafter]


def _group_and_fine(depth: IntArray, rank: IntArray, gap: FloatArray) -> tuple[Indices, Indices]:
    """Return each node's index of (depth, rank), and of its gap in steps of 1/8 (NaN: the last)."""
    group = (np.minimum(depth, _DEPTHS) - 1) * _RANKS + np.minimum(rank, _RANKS - 1)
    fine = np.fmax(np.fmin(gap * np.float32(_FINE_PER_UNIT), np.float32(_FINE - 1)), np.float32(0.0))
    return group.astype(np.int64), fine.astype(np.int64)


def _chance(log_odds: Floats) -> Floats:
    bounded = np.minimum(np.maximum(log_odds, -_MOST_LOG_ODDS), _MOST_LOG_ODDS)
    return np.asarray(1.0 / (1.0 + np.exp(-bounded)))
