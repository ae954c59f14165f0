"""The vectorised tree walk equals its slow twin."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from twins.tree import accept_slow

from rlhfspec.engine.drafting.base import Forest
from rlhfspec.engine.drafting.tree import accept, ancestors, index_in_sequence


def random_forest(rng: np.random.Generator, num_sequences: int, size: int, vocab: int) -> Forest:
    sequence, parent, depth, token = [], [], [], []
    taken: set[tuple[int, int, int]] = set()
    for _ in range(size):
        owner = int(rng.integers(num_sequences))
        mine = [-1, *(node for node, of in enumerate(sequence) if of == owner)]
        above = int(rng.choice(mine))
        word = int(rng.integers(vocab))
        if (owner, above, word) in taken:
            continue
        taken.add((owner, above, word))
        sequence.append(owner)
        parent.append(above)
        depth.append(1 if above < 0 else depth[above] + 1)
        token.append(word)
    count = len(token)
    zeros = np.zeros(count, np.float32)
    ints = [np.asarray(values, np.int32) for values in (sequence, parent, depth, token)]
    return Forest(
        sequence=ints[0], parent=ints[1], depth=ints[2], token=ints[3], rank=np.zeros(count, np.int32),
        gap=zeros, path_acceptance=zeros,
    )  # fmt: skip


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(0, 40))
def test_walk_equals_its_slow_twin(seed: int, num_sequences: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, num_sequences, size, vocab=3)
    roots = rng.integers(0, 3, num_sequences).astype(np.int32)
    choices = rng.integers(0, 3, forest.size).astype(np.int32)
    walk = accept(forest, num_sequences, roots, choices)
    for sequence, expected in enumerate(accept_slow(forest, num_sequences, roots, choices)):
        path = walk.path[sequence, 1 : 1 + walk.num_accepted[sequence]].tolist()
        assert path == expected
        assert np.flatnonzero(walk.accepted & (forest.sequence == sequence)).tolist() == sorted(expected)
    for node in range(forest.size):
        parent = forest.parent[node]
        assert walk.reached[node] == (parent < 0 or walk.accepted[parent])


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 30))
def test_ancestors_list_the_path_from_the_top(seed: int, num_sequences: int, size: int) -> None:
    forest = random_forest(np.random.default_rng(seed), num_sequences, size, vocab=4)
    table = ancestors(forest)
    for node in range(forest.size):
        path, current = [], node
        while current >= 0:
            path.append(current)
            current = int(forest.parent[current])
        assert table[node][table[node] >= 0].tolist() == path[::-1]


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 30))
def test_taking_a_closed_part_keeps_the_structure(seed: int, num_sequences: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    forest = random_forest(rng, num_sequences, size, vocab=4)
    wanted = rng.random(forest.size) < 0.7
    for node in range(forest.size):  # closed under parents
        if forest.parent[node] >= 0 and not wanted[forest.parent[node]]:
            wanted[node] = False
    keep = np.flatnonzero(wanted).astype(np.int32)
    part = forest.take(keep)
    for new, old in enumerate(keep):
        assert part.token[new] == forest.token[old]
        assert (part.parent[new] == -1) == (forest.parent[old] == -1)
        if part.parent[new] >= 0:
            assert keep[part.parent[new]] == forest.parent[old]


def test_index_in_sequence_counts_each_sequence_apart() -> None:
    forest = random_forest(np.random.default_rng(3), 3, 25, vocab=9)
    index = index_in_sequence(forest, 3)
    for sequence in range(3):
        assert index[forest.sequence == sequence].tolist() == list(range(int((forest.sequence == sequence).sum())))
