"""The grids of plans: what the adaptive selector chooses from, and the named static strategies of the benchmark.

Example:
    >>> sorted(static_grid(("suffix",)))
    ['suffix-d4', 'suffix-d8']
    >>> static_grid(("model",))["model-d6-w2-b3"].depth
    6
"""

from __future__ import annotations

from collections.abc import Iterable

from rlhfspec.drafting.base import PLAIN, Plan

_CHAIN_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
_TREES = {(2, 2): (2, 3, 4, 6, 8), (2, 3): (2, 3, 4, 6, 8), (4, 3): (3, 4, 6, 8)}  # (width, branch): depths
_SMALL_BATCH_TREES = {(8, 4): (3, 4, 6)}  # only where some dozens of rows cost little more than one
_SMALL_BATCH = 8
_SUFFIX_SHAPES = {(1, 2): (2, 4, 8, 12), (2, 3): (4, 8)}


def default_plans(drafters: Iterable[str], max_batch: int) -> tuple[Plan, ...]:
    """What the adaptive selector considers. The budget prunes what does not pay, and candidates of an expanded node
    come for nothing, so even its chains draft two candidates a node."""
    plans = [PLAIN]
    for name in drafters:
        shapes: dict[tuple[int, int], tuple[int, ...]] = {(1, 2): _CHAIN_DEPTHS, **_TREES}
        if max_batch <= _SMALL_BATCH:
            shapes |= _SMALL_BATCH_TREES
        if name == "suffix":
            shapes = _SUFFIX_SHAPES
        plans += [
            Plan(drafter=name, depth=depth, width=width, branch=branch)
            for (width, branch), depths in shapes.items()
            for depth in depths
        ]
    return tuple(plans)


def static_grid(drafters: Iterable[str]) -> dict[str, Plan]:
    """The named static strategies: chains, trees, and trees with a global budget of 4 or 8 nodes a sequence."""
    grid: dict[str, Plan] = {}
    for name in drafters:
        for depth in (4, 8) if name == "suffix" else (1, 2, 3, 4, 6, 8):
            grid[f"{name}-d{depth}"] = Plan(drafter=name, depth=depth)
        if name == "suffix":
            continue
        for depth, width, branch in ((2, 1, 2), (4, 1, 2), (4, 2, 2), (6, 2, 3), (8, 4, 3)):
            plan = Plan(drafter=name, depth=depth, width=width, branch=branch)
            grid[plan.name] = plan
        for depth, nodes in ((6, 4), (8, 8)):
            plan = Plan(drafter=name, depth=depth, width=1, branch=2, max_nodes=nodes)
            grid[plan.name] = plan
    return grid
