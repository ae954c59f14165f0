"""How likely a drafted token is the target's choice, learnt while generating.

Under shared noise the telling feature is the gap between perturbed scores. Nodes fall into cells of
(depth 1 / 2 / 3+, rank 0 / 1 / 2 / 3+, gap bucket); each cell counts with exponential forgetting, leans on its
neighbours of other depths and on a prior where counts are thin, and is kept monotone in the gap. On top, every
sequence has a shift in log-odds of its own, shrunk to the drafter's mean: one bad sequence poisons neither the
others nor the table, and what a bad tail taught is forgotten with its row.

Example:
    >>> model = AcceptanceModel(num_rows=4)
    >>> one = lambda value, kind: np.array([value], kind)
    >>> sure, torn = (
    ...     float(model.predict("model", one(0, np.int32), one(1, np.int32), one(0, np.int32), one(gap, np.float32))[0])
    ...     for gap in (9.0, 0.1)
    ... )
    >>> sure > 0.9 > 0.6 > torn
    True
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlhfspec.arrays import BoolArray, FloatArray, Floats, IntArray

GAP_EDGES = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 20.0)
_CENTRES = np.array((0.1, 0.37, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 10.0, 16.0, 28.0))
_BUCKETS = len(_CENTRES)
_DEPTHS, _RANKS = 3, 4
_CELLS = _DEPTHS * _RANKS * _BUCKETS
_FINE, _FINE_PER_UNIT = 256, 8.0  # gaps are read from a fine table, 1/8 apart, up to 32
_MOST_LOG_ODDS = 9.0  # never surer than .9999, so that a child is always strictly below its parent
_POOL_WEIGHT, _PRIOR_WEIGHT = (
    12.0,
    6.0,
)  # pseudo-observations: other depths' weight in a cell; the prior's in their pool
_SHIFT_PRECISION = 3.0  # a sequence's shift is believed to be within about +-1/2 until it shows otherwise
_SHIFT_MEMORY = 24.0  # what a sequence showed fades over this much later evidence (some hundred nodes)
_MOST_SHIFT_STEP = 1.0
_RESET_TRIALS = 50.0  # what a table still counts for after the weights changed
_MEAN_RATE = 0.05  # how much one finished sequence moves the shift that new ones start from


def _interpolation() -> Floats:
    """[buckets, fine]: weights that read a log-odds curve between bucket centres."""
    fine = np.arange(_FINE) / _FINE_PER_UNIT
    return np.array([np.interp(fine, _CENTRES, np.eye(_BUCKETS)[bucket]) for bucket in range(_BUCKETS)])


def _prior() -> Floats:
    """[ranks, buckets]: what a middling drafter shows. Rank 0 grows with the gap; the others share what it leaves."""
    best = 1.0 - 0.52 * np.exp(-0.75 * _CENTRES) - 0.01
    others = [(1.0 - best) * share for share in (0.75, 0.45, 0.3)]
    return np.array([best, *others])


_INTERPOLATION = _interpolation()
_PRIOR = _prior()
_BUCKET_OF_FINE = np.searchsorted(GAP_EDGES, np.arange(_FINE) / _FINE_PER_UNIT, side="right")


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRow:
    """Predicted against real acceptance of one group of observations (recent ones weigh more)."""

    drafter: str
    group: str  # "decile 0.9-1.0" or "depth 1, rank 0, gap 0.25-0.5"
    count: float
    predicted: float
    real: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """`error` is the expected calibration error over deciles: the mean of |predicted - real| by count."""

    error: float
    deciles: tuple[CalibrationRow, ...]
    cells: tuple[CalibrationRow, ...]


class _Book:
    """Everything known about one drafter."""

    def __init__(self, num_rows: int) -> None:
        self.trials = np.zeros(_CELLS)
        self.hits = np.zeros(_CELLS)  # what sequences' own shifts explain is taken out
        self.seen = np.zeros((3, _CELLS))  # for the report: count, predicted, real
        self.deciles = np.zeros((3, 10))
        self.mean_shift = 0.0
        self.shift = np.zeros(num_rows)
        self.precision = np.full(num_rows, _SHIFT_PRECISION)
        self.log_odds = np.zeros(_DEPTHS * _RANKS * _FINE)
        self.rebuild()

    def rebuild(self) -> None:
        """Counts to log-odds: pool over depths, shrink, make monotone in the gap, interpolate."""
        trials = self.trials.reshape(_DEPTHS, _RANKS, _BUCKETS)
        hits = self.hits.reshape(_DEPTHS, _RANKS, _BUCKETS)
        pool = (hits.sum(axis=0) + _PRIOR_WEIGHT * _PRIOR) / (trials.sum(axis=0) + _PRIOR_WEIGHT)
        weight = trials + _POOL_WEIGHT
        chance = (hits + _POOL_WEIGHT * pool) / weight
        chance[:, 0] = _isotonic(chance[:, 0], weight[:, 0])  # a larger lead: likelier
        chance[:, 1:] = _isotonic(chance[:, 1:, ::-1], weight[:, 1:, ::-1])[..., ::-1]  # further behind: less likely
        chance = np.clip(chance, 1e-4, 1.0 - 1e-4)
        log_odds = np.log(chance / (1.0 - chance)).reshape(_DEPTHS * _RANKS, _BUCKETS)
        self.log_odds = (log_odds @ _INTERPOLATION).ravel()

    def count(
        self, cell: npt.NDArray[np.int64], predicted: Floats, of_table: Floats, real: Floats, half_life: float
    ) -> None:
        """Add observations to all counts."""
        kept = 0.5 ** (len(cell) / half_life)
        trials = np.bincount(cell, minlength=_CELLS)
        self.trials = self.trials * kept + trials
        self.hits = self.hits * kept + np.bincount(cell, real - predicted + of_table, _CELLS)
        self.seen = self.seen * kept + (trials, np.bincount(cell, predicted, _CELLS), np.bincount(cell, real, _CELLS))
        decile = (predicted * 10.0).astype(np.int64)
        counts = (np.bincount(decile, weights, 10) for weights in (None, predicted, real))
        self.deciles = self.deciles * kept + tuple(counts)

    def start_over(self) -> None:
        kept = min(1.0, _RESET_TRIALS / max(float(self.trials.sum()), 1.0))
        self.trials *= kept
        self.hits *= kept
        self.seen[:] = 0.0
        self.deciles[:] = 0.0
        self.mean_shift = 0.0
        self.shift[:] = 0.0
        self.precision[:] = _SHIFT_PRECISION
        self.rebuild()

    def shift_of(self, rows: IntArray) -> Floats:
        try:
            return self.shift.take(rows)
        except IndexError:  # an engine with more rows than it announced
            more = int(rows.max()) + 1 - len(self.shift)
            self.shift = np.concatenate((self.shift, np.full(more, self.mean_shift)))
            self.precision = np.concatenate((self.precision, np.full(more, _SHIFT_PRECISION)))
            return self.shift.take(rows)

    def forget(self, row: int) -> None:
        if row >= len(self.shift):
            return
        learnt = 1.0 - _SHIFT_PRECISION / self.precision[row]  # 0: showed nothing, towards 1: well known
        self.mean_shift += _MEAN_RATE * float(learnt) * (float(self.shift[row]) - self.mean_shift)
        self.shift[row] = self.mean_shift
        self.precision[row] = _SHIFT_PRECISION


class AcceptanceModel:
    """Implements rlhfspec.drafting.base.Acceptance.

    `half_life`: observations (of one drafter) after which an old one counts half.
    """

    def __init__(self, num_rows: int = 256, *, half_life: float = 6000.0) -> None:
        self._num_rows = num_rows
        self._half_life = half_life
        self._books: dict[str, _Book] = {}

    def predict(self, drafter: str, rows: IntArray, depth: IntArray, rank: IntArray, gap: FloatArray) -> FloatArray:
        """Acceptance of each node given that its parent was accepted, in (0, 1). All arguments [M]."""
        book = self._book(drafter)
        group, fine = _group_and_fine(depth, rank, gap)
        log_odds = book.log_odds.take(group * _FINE + fine)
        log_odds += book.shift_of(rows)
        return _chance(log_odds).astype(np.float32)

    def curves(self, drafter: str, rows: IntArray) -> tuple[Floats, Floats]:
        """What `predict` reads, as numbers: log-odds by depth (1 / 2 / 3+), rank (0 / 1 / 2 / 3+) and gap (in steps of
        1/8), flat, and the shift of each row."""
        book = self._book(drafter)
        return book.log_odds, book.shift_of(rows)

    def observe(
        self, drafter: str, rows: IntArray, depth: IntArray, rank: IntArray, gap: FloatArray, accepted: BoolArray
    ) -> None:
        """Learn from nodes whose parent was accepted (only those were really tested). All arguments [M].

        Costs some hundred microseconds whatever M is: the selectors call it for several steps at once.
        """
        if not len(rows):
            return
        book = self._book(drafter)
        group, fine = _group_and_fine(depth, rank, gap)
        cell = group * _BUCKETS + _BUCKET_OF_FINE.take(fine)
        table_log_odds = book.log_odds.take(group * _FINE + fine)
        shift = book.shift_of(rows)
        predicted = _chance(table_log_odds + shift)
        of_table = _chance(table_log_odds)
        real = accepted.astype(np.float64)
        self._learn_shifts(book, rows, real - predicted, predicted)
        book.count(cell, predicted, of_table, real, self._half_life)
        book.rebuild()

    def forget(self, row: int) -> None:
        """The sequence left its table row: the next one there starts from the drafters' means."""
        for book in self._books.values():
            book.forget(row)

    def learnt(self, row: int) -> tuple[tuple[str, float, float], ...]:
        """What is known of the sequence in this row alone: by drafter, its shift and how sure it is."""
        books = ((name, book) for name, book in self._books.items() if row < len(book.shift))
        return tuple((name, float(book.shift[row]), float(book.precision[row])) for name, book in books)

    def take_over(self, row: int, learnt: Iterable[tuple[str, float, float]]) -> None:
        """The row's sequence was drafted for elsewhere."""
        for drafter, shift, precision in learnt:
            book = self._book(drafter)
            book.shift_of(np.array([row], np.int32))
            book.shift[row], book.precision[row] = shift, precision

    def reset(self, drafter: str | None = None) -> None:
        """Weights changed (or one drafter's acceptance jumped): the tables fall back towards the prior."""
        for name, book in self._books.items():
            if drafter is None or name == drafter:
                book.start_over()

    def calibration(self, drafter: str | None = None) -> Calibration:
        """Predicted against real, by decile of prediction and by cell; of one drafter or of all."""
        deciles, cells, error, total = [], [], 0.0, 0.0
        for name, book in self._books.items():
            if drafter is not None and name != drafter:
                continue
            labels = [f"decile {low / 10:.1f}-{(low + 1) / 10:.1f}" for low in range(10)]
            deciles += _rows(name, labels, book.deciles)
            cells += _rows(name, _CELL_LABELS, book.seen)
            error += float(np.abs(book.deciles[1] - book.deciles[2]).sum())
            total += float(book.deciles[0].sum())
        return Calibration(error=error / total if total else 0.0, deciles=tuple(deciles), cells=tuple(cells))

    def _book(self, drafter: str) -> _Book:
        book = self._books.get(drafter)
        if book is None:
            book = self._books[drafter] = _Book(self._num_rows)
        return book

    @staticmethod
    def _learn_shifts(book: _Book, rows: IntArray, surprise: Floats, predicted: Floats) -> None:
        """One Newton step for each sequence: evidence raises its precision, memory lets it fade to the mean."""
        size = len(book.shift)
        information = np.bincount(rows, predicted * (1.0 - predicted), size)
        touched = np.flatnonzero(information)
        information, shift = information[touched], book.shift[touched]
        kept = np.exp(information * (-1.0 / _SHIFT_MEMORY))
        precision = _SHIFT_PRECISION + kept * (book.precision[touched] - _SHIFT_PRECISION) + information
        towards_mean = (1.0 - kept) * _SHIFT_PRECISION * (book.mean_shift - shift)
        step = (np.bincount(rows, surprise, size)[touched] + towards_mean) / precision
        book.shift[touched] = shift + np.minimum(np.maximum(step, -_MOST_SHIFT_STEP), _MOST_SHIFT_STEP)
        book.precision[touched] = precision


def _group_and_fine(
    depth: IntArray, rank: IntArray, gap: FloatArray
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Index of (depth, rank), and of the gap in the fine table. fmin and fmax turn a NaN into an ordinary gap."""
    group = (np.minimum(depth, _DEPTHS) - 1) * _RANKS + np.minimum(rank, _RANKS - 1)
    fine = np.fmax(np.fmin(gap * np.float32(_FINE_PER_UNIT), np.float32(_FINE - 1)), np.float32(0.0)).astype(np.int64)
    return group.astype(np.int64), fine


def _chance(log_odds: Floats) -> Floats:
    bounded = np.minimum(np.maximum(log_odds, -_MOST_LOG_ODDS), _MOST_LOG_ODDS)
    return np.asarray(1.0 / (1.0 + np.exp(-bounded)))


def _isotonic(values: Floats, weights: Floats) -> Floats:
    """The closest non-decreasing sequence along the last axis: max over i<=k of min over j>=k of mean(i..j).

    >>> _isotonic(np.array([1.0, 5.0, 3.0, 9.0]), np.ones(4)).tolist()
    [1.0, 4.0, 4.0, 9.0]
    """
    size = values.shape[-1]
    zero = np.zeros((*values.shape[:-1], 1))
    total_weight = np.concatenate((zero, np.cumsum(weights, axis=-1)), axis=-1)
    total_value = np.concatenate((zero, np.cumsum(weights * values, axis=-1)), axis=-1)
    weight = total_weight[..., None, 1:] - total_weight[..., :-1, None]  # [..., i, j]: weight of i..j
    value = total_value[..., None, 1:] - total_value[..., :-1, None]
    inside = np.tri(size, dtype=np.bool_).T  # i <= j
    mean = np.where(inside, value / np.where(inside, weight, 1.0), np.inf)
    lowest = np.minimum.accumulate(mean[..., ::-1], axis=-1)[..., ::-1]  # [..., i, k]: min over j >= k
    return np.asarray(np.where(inside, lowest, -np.inf).max(axis=-2))


def _rows(drafter: str, labels: list[str], sums: Floats) -> list[CalibrationRow]:
    return [
        CalibrationRow(drafter=drafter, group=label, count=float(n), predicted=float(p / n), real=float(r / n))
        for label, n, p, r in zip(labels, *sums, strict=True)
        if n > 0.5
    ]


def _cell_labels() -> list[str]:
    edges = ("0", *(f"{edge:g}" for edge in GAP_EDGES), "inf")
    return [
        f"depth {depth}, rank {rank}, gap {low}-{high}"
        for depth in ("1", "2", "3+")
        for rank in ("0", "1", "2", "3+")
        for low, high in itertools.pairwise(edges)
    ]


_CELL_LABELS = _cell_labels()
