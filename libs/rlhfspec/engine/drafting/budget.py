"""Choice of the drafted nodes to verify. Any prefix of nodes sorted by path acceptance is a valid forest."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rlhfspec.common.arrays import FloatArray, IntArray
from rlhfspec.engine.drafting.base import Forest

_EVERY_BUDGET_UP_TO = 48
_NUM_BUDGETS = 40  # evaluated beyond that; the curve between them is smooth
_LEAST_WEIGHT, _MOST_WEIGHT = 0.25, 4.0  # for sequences with much less or more room than the others


def best_nodes(path_acceptance: FloatArray, num_nodes: int, ranked: FloatArray | None = None) -> IntArray:
    """Return ascending indices of the `num_nodes` largest (ties: the first). `ranked`: the values, if already sorted.

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


def worth_by_room(forest: Forest, room: IntArray) -> FloatArray:
    """Return path acceptance weighted by each sequence's `room` (tokens still to come), so that all end together."""
    mean = room.mean() if len(room) else 0.0
    if mean <= 0.0 or (room == room[0]).all():
        return forest.path_acceptance
    weight = (room / mean).clip(_LEAST_WEIGHT, _MOST_WEIGHT).astype(np.float32)
    return forest.path_acceptance * weight[forest.sequence]


def descending(values: FloatArray) -> FloatArray:
    ranked = np.negative(values)
    ranked.sort()
    return np.negative(ranked, out=ranked)


@lru_cache(maxsize=4096)
def budgets(limit: int) -> npt.NDArray[np.int64]:
    """Return the numbers of nodes to compare: all up to `limit`, or an even grid if there are many.

    >>> budgets(5).tolist(), len(budgets(900))
    ([0, 1, 2, 3, 4, 5], 49)
    """
    if limit <= _EVERY_BUDGET_UP_TO:
        return np.arange(limit + 1)
    return np.concatenate((np.arange(9), np.linspace(9, limit, _NUM_BUDGETS).round().astype(np.int64)))
