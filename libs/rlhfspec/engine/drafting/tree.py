"""Tree walks to the drafted nodes that the target chose, in one numpy pass per level."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfspec.common.arrays import BoolArray, IntArray
from rlhfspec.engine.drafting.base import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    reached: BoolArray  # [M] the node's parent was accepted
    accepted: BoolArray  # [M]
    path: IntArray  # [B, D+1] node index by depth; column 0 is the root (-1); -1 after the path's end
    num_accepted: IntArray  # [B]


def accept(forest: Forest, num_sequences: int, root_choice: IntArray, node_choice: IntArray) -> Walk:
    """Follow the target's choices down each tree, and return the accepted paths.

    `root_choice[b]` is its token after sequence b's last one, `node_choice[m]` its token after node m.
    """
    accepted = np.zeros(forest.size, np.bool_)
    reached = np.zeros(forest.size, np.bool_)
    depth = int(forest.depth.max()) if forest.size else 0
    path = np.full((num_sequences, depth + 1), -1, np.int32)
    num_accepted = np.zeros(num_sequences, np.int32)
    for level in range(1, depth + 1):
        nodes = np.flatnonzero(forest.depth == level)
        parents = forest.parent[nodes]
        alive = (parents < 0) | accepted[parents]
        nodes, parents = nodes[alive], parents[alive]
        if not len(nodes):
            break
        reached[nodes] = True
        sequences = forest.sequence[nodes]
        wanted = root_choice[sequences] if level == 1 else node_choice[parents]
        chosen = nodes[forest.token[nodes] == wanted]
        accepted[chosen] = True
        path[forest.sequence[chosen], level] = chosen
        num_accepted[forest.sequence[chosen]] = level
    return Walk(reached=reached, accepted=accepted, path=path, num_accepted=num_accepted)


def ancestors(forest: Forest) -> IntArray:
    """Return the node indices [M, D] on each node's path, itself last, padded with -1."""
    depth = int(forest.depth.max()) if forest.size else 0
    table = np.full((forest.size, depth), -1, np.int32)
    for level in range(1, depth + 1):
        nodes = np.flatnonzero(forest.depth == level)
        if level > 1:
            table[nodes, : level - 1] = table[forest.parent[nodes], : level - 1]
        table[nodes, level - 1] = nodes
    return table


def index_in_sequence(forest: Forest, num_sequences: int) -> IntArray:
    """Return each node's index [M] among the nodes of its sequence."""
    order = np.argsort(forest.sequence, kind="stable")
    counts = np.bincount(forest.sequence, minlength=num_sequences)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    index = np.empty(forest.size, np.int32)
    index[order] = np.arange(forest.size) - starts[forest.sequence[order]]
    return index
