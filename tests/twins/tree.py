"""The walk down drafted trees, one sequence and one node at a time."""

from rlhfspec.common.arrays import IntArray
from rlhfspec.engine.drafting.base import Forest


def accept_slow(forest: Forest, num_sequences: int, root_choice: IntArray, node_choice: IntArray) -> list[list[int]]:
    paths: list[list[int]] = []
    for sequence in range(num_sequences):
        path: list[int] = []
        choice, parent = int(root_choice[sequence]), -1
        while True:
            edges = zip(forest.sequence, forest.parent, forest.token, strict=True)
            children = [node for node, edge in enumerate(edges) if edge == (sequence, parent, choice)]
            if not children:
                break
            path.append(children[0])
            choice, parent = int(node_choice[children[0]]), children[0]
        paths.append(path)
    return paths
