"""After drafting: which nodes are worth a row of the verification. One sort, no search.

A child is never likelier than its parent, so every prefix of the nodes in descending order of path acceptance is a
valid forest, and prefix sums give the expected accepted tokens of every budget at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rlhfspec.arrays import FloatArray, IntArray
from rlhfspec.drafting.base import Forest

_EVERY_BUDGET_UP_TO = 48
_MOST_WEIGHT = 2.0  # of a sequence that has much more room than the others
_NUM_BUDGETS = 40  # looked at beyond that; the curve between them is smooth


def best_nodes(path_acceptance: FloatArray, num_nodes: int, ranked: FloatArray | None = None) -> IntArray:
    """Ascending indices of the best `num_nodes`; of equals the first, so that parents come before their children.

    `ranked`: the same values in descending order, if somebody has sorted them already.

    >>> best_nodes(np.array([0.9, 0.5, 0.5, 0.8], np.float32), 3).tolist()
    [0, 1, 3]
    """
    if num_nodes >= len(path_acceptance):
        return np.arange(len(path_acceptance), dtype=np.int32)
    if num_nodes == 0:
        return np.empty(0, np.int32)
    ranked = descending(path_acceptance) if ranked is None else ranked
    keep = np.asarray(path_acceptance >= ranked[num_nodes - 1]).nonzero()[0]
    if len(keep) > num_nodes:  # ties at the threshold
        keep = np.sort(np.argsort(-path_acceptance, kind="stable")[:num_nodes])
    return np.asarray(keep, np.int32)


def best_nodes_of_each(forest: Forest, num_nodes: int) -> IntArray:
    """The best `num_nodes` of every sequence on its own."""
    order = np.lexsort((-forest.path_acceptance, forest.sequence))  # stable
    sequence = forest.sequence[order]
    place = np.arange(forest.size) - np.searchsorted(sequence, sequence)
    return np.sort(order[place < num_nodes]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class Budgets:
    """Numbers of nodes to look at: ascending, 0 first. The same numbers three times, as each is quickest read."""

    counts: npt.NDArray[np.int64]
    floats: npt.NDArray[np.float64]
    whole: list[int]

    def sums(self, ranked: FloatArray) -> FloatArray:
        """The sum of the first N values for every N looked at."""
        if len(self.whole) == 1:
            return np.zeros(1, np.float32)
        sums = ranked.cumsum().take(self.counts - 1)
        sums[0] = 0.0
        return sums


def worth_by_room(forest: Forest, room: IntArray) -> FloatArray:
    """What each node's acceptance is worth: more where much is still to be generated.

    The surest sequences would otherwise run ahead and leave the others to small batches, whose steps cost about as much
    as those of large ones. One weight a sequence, so a child is still never worth more than its parent.

    >>> from rlhfspec.drafting.base import empty_forest
    >>> worth_by_room(empty_forest(), np.array([10, 40], np.int32)).tolist()
    []
    """
    mean = room.mean() if len(room) else 0.0
    if mean <= 0.0 or (room == room[0]).all():
        return forest.path_acceptance
    weight = np.sqrt(room / mean).clip(1.0 / _MOST_WEIGHT, _MOST_WEIGHT).astype(np.float32)
    return forest.path_acceptance * weight[forest.sequence]


def descending(path_acceptance: FloatArray) -> FloatArray:
    """A sorted copy."""
    ranked = np.negative(path_acceptance)
    ranked.sort()
    return np.negative(ranked, out=ranked)


def budgets(limit: int, rows: int, buckets: tuple[int, ...] | None) -> Budgets:
    """Every number, or an even grid where there are many, or those that fill a bucket of total rows.

    >>> budgets(5, 8, None).whole, budgets(30, 8, (8, 16, 32, 64)).whole
    ([0, 1, 2, 3, 4, 5], [0, 8, 24, 30])
    """
    if buckets is None:
        return _grid(limit)
    return _budgets({0, *(min(bucket - rows, limit) for bucket in buckets if bucket > rows)})


@lru_cache(maxsize=4096)
def _grid(limit: int) -> Budgets:
    if limit <= _EVERY_BUDGET_UP_TO:
        return _budgets(range(limit + 1))
    return _budgets({*range(9), *np.linspace(9, limit, _NUM_BUDGETS).round().astype(np.int64).tolist()})


def _budgets(numbers: Iterable[int]) -> Budgets:
    whole = sorted(numbers)
    return Budgets(np.array(whole, np.int64), np.array(whole, np.float64), whole)
