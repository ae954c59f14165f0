"""What a plan would bring, without trying it: expected accepted tokens for every budget of every plan.

Kept is how the conditional acceptances of drafted children are spread, by level (first, deeper) and rank. In the mean
over many sequences a tree is then a flow of nodes through bins of path acceptance: expanding the best `width` nodes of
a level multiplies their flow by the children's spread. Expectations add up whatever is correlated
with what, so one small matrix product a level gives, for each plan, how many nodes lie above every path
acceptance, and what they bring.

Example: a drafter whose every proposal is right with probability exp(-1/2).
    >>> profile = DraftProfile()
    >>> profile.spread[:] = 0
    >>> profile.spread[:, 0, round(0.5 / BIN)] = 1
    >>> forecast = Forecast(profile, (Plan(drafter="model", depth=3),))
    >>> round(float(forecast.accepted[0, -1]), 3), round(float(forecast.nodes[0, -1]), 3)  # .607 + .607**2 + .607**3
    (1.198, 3.0)
"""

from __future__ import annotations

import numpy as np

from rlhfspec.arrays import Floats
from rlhfspec.drafting.base import Forest, Plan

BIN = 0.0625  # width of a bin of -log(path acceptance)
_BINS = 64  # down to a path acceptance of exp(-4) = .018; less is never worth a row
_RANKS = 4
_VALUE = np.exp(-BIN * np.arange(_BINS))  # path acceptance at each bin's start
_THRESHOLDS = np.array([0, 1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 24, 28, 33, 38, 44, 50, 57, _BINS - 1])
_MEMORY = 192.0  # expanded nodes that an estimate remembers
_SHIFTED = np.arange(_BINS)[None, :] - np.arange(_BINS)[:, None]  # [from, to]: bins moved
_SHIFTED = np.where(_SHIFTED < 0, _BINS, _SHIFTED)  # an expansion never raises the path acceptance


def _guess() -> Floats:
    """[2, ranks, bins]: children of a middling drafter, before any has been seen."""
    spread = np.zeros((2, _RANKS, _BINS))
    for chance, share in ((0.98, 0.4), (0.8, 0.3), (0.5, 0.3)):
        spread[:, 0, round(-np.log(chance) / BIN)] += share
    for rank, chance in ((1, 0.15), (2, 0.07), (3, 0.03)):
        spread[:, rank, round(-np.log(chance) / BIN)] = 1.0
    return spread


class DraftProfile:
    """Expected children of one expanded node: `spread[deeper, rank, bin]`, learnt from proposed forests."""

    def __init__(self) -> None:
        self.spread = _guess()
        self._weight = np.full(2, 8.0)  # expanded nodes behind the estimate, so that the first ones count much

    def observe(self, forests: list[Forest], num_sequences: int, branch: int) -> None:
        """`forests` as proposed, before any budget; ranks from `branch` on were not asked for and stay as they are."""
        paths = [forest.path_acceptance for forest in forests]
        above = [np.append(path, np.float32(1.0))[forest.parent] for path, forest in zip(paths, forests, strict=True)]
        depth = np.concatenate([forest.depth for forest in forests])
        rank = np.concatenate([forest.rank for forest in forests])
        path = np.maximum(np.concatenate(paths), np.float32(1e-9))
        moved = np.log(np.concatenate(above) / path).astype(np.float64) * (1.0 / BIN)
        moved = np.minimum(np.maximum(moved, 0.0), _BINS - 1.001)
        low = moved.astype(np.int64)
        share = moved - low
        group = (depth > 1) * _RANKS + np.minimum(rank, _RANKS - 1)
        cell = group * _BINS + low
        size = 2 * _RANKS * _BINS
        counted = np.bincount(cell, 1.0 - share, size)
        counted += np.bincount(cell + 1, share, size + 1)[:size]
        children = counted.reshape(2, _RANKS, _BINS)
        num_expanded = (float(num_sequences), float(children[1, 0].sum()))  # every expanded node has one best child
        for level in (0, 1):
            if num_expanded[level] < 0.5:
                continue
            rate = num_expanded[level] / (num_expanded[level] + self._weight[level])
            kept = self.spread[level, :branch]
            kept += rate * (children[level, :branch] / num_expanded[level] - kept)
            self._weight[level] = min(self._weight[level] + num_expanded[level], _MEMORY)

    def forget(self) -> None:
        """Weights changed: keep the estimate, believe it little."""
        self._weight[:] = 8.0

    def success(self) -> list[float]:
        """Expected accepted children of a node expanded below the first level, by number of candidates (0, 1, ...)."""
        return [0.0, *np.cumsum(self.spread[1] @ _VALUE).tolist()]


class Forecast:
    """Curves for `plans` of one drafter, all per sequence.

    nodes, accepted: [P, T] with the nodes of path acceptance above the T-th threshold.
    level_rows: [D-1, P] nodes expanded for level 2, 3, ...; 0 below a plan's depth.
    """

    def __init__(self, profile: DraftProfile, plans: tuple[Plan, ...]) -> None:
        shapes = sorted({(plan.width, plan.branch) for plan in plans})
        deepest = max(plan.depth for plan in plans)
        levels, expanded_rows = _flow(profile, shapes, deepest)
        shape_of = [shapes.index((plan.width, plan.branch)) for plan in plans]
        depth_of = np.array([plan.depth for plan in plans])
        flow = np.cumsum(levels, axis=0)[depth_of - 1, shape_of]  # [P, bins]
        self.plans = plans
        self.nodes: Floats = np.cumsum(flow, axis=1)[:, _THRESHOLDS]
        self.accepted: Floats = np.cumsum(flow * _VALUE, axis=1)[:, _THRESHOLDS]
        reached = np.arange(2, deepest + 1)[:, None] <= depth_of  # [D-1, P]
        self.level_rows: Floats = np.where(reached, expanded_rows[:, shape_of], 0.0)


def _flow(profile: DraftProfile, shapes: list[tuple[int, int]], deepest: int) -> tuple[Floats, Floats]:
    """Nodes of each level by bin, [D, shapes, bins], and the rows expanded for levels 2.., [D-1, shapes]."""
    widths = np.array([float(width) for width, _ in shapes])[:, None]
    children = np.zeros(
        (2, len(shapes), _BINS + 1)
    )  # the extra last bin stays 0: what _SHIFTED reads below the diagonal
    summed = np.cumsum(profile.spread, axis=1)
    for i, (_, branch) in enumerate(shapes):
        children[:, i, :_BINS] = summed[:, min(branch, _RANKS) - 1]
    step = children[1][:, _SHIFTED]  # [shapes, from, to]
    levels = np.zeros((deepest, len(shapes), _BINS))
    rows = np.zeros((max(deepest - 1, 0), len(shapes)))
    levels[0] = children[0, :, :_BINS]
    for level in range(1, deepest):
        best = np.minimum(np.cumsum(levels[level - 1], axis=1), widths)
        rows[level - 1] = best[:, -1]
        best[:, 1:] -= best[:, :-1].copy()  # from cumulated to per bin: the best `width` nodes
        levels[level] = np.matmul(best[:, None, :], step)[:, 0, :]
    return levels, rows
