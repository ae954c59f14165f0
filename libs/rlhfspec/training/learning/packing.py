"""Packing of whole sequences into micro-batches by length.

>>> pack([5, 9, 2, 3, 8], tokens_per_micro_batch=10)
[[0, 3], [1], [2, 4]]
>>> pack_groups([(5, 6, 7, 8)] * 3, [2, 2, 2], tokens_per_micro_batch=9)  # a prompt runs once for its neighbours
[[0, 1], [2]]
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence


def pack(lengths: Sequence[int], tokens_per_micro_batch: int, *, multiple_of: int = 1) -> list[list[int]]:
    """Pack sequences into micro-batches of indices, each within the budget unless one sequence exceeds it.

    The number of micro-batches is a multiple of `multiple_of` (ranks). Indices are in ascending order.
    """
    budget = tokens_per_micro_batch
    fewest = max(1, -(-sum(min(length, budget) for length in lengths) // budget))
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    count = -(-fewest // multiple_of) * multiple_of
    while (bins := _spread(lengths, order, count, budget)) is None:
        count += multiple_of
    return sorted((sorted(members) for members in bins), key=lambda members: (not members, members))


def pack_groups(
    prompts: Sequence[tuple[int, ...]], answers: Sequence[int], tokens_per_micro_batch: int, *, multiple_of: int = 1
) -> list[list[int]]:
    """Pack as `pack` does, running equal neighbouring prompts once. answers: number of tokens to run per response.

    Groups are split only to fit the budget or to lower the busiest rank's load.
    """
    found: tuple[int, list[list[int]]] | None = None
    for num_parts in range(1, multiple_of + 1):
        runs = list(_runs(prompts, answers, tokens_per_micro_batch, num_parts))
        lengths = [len(prompts[run[0]]) + sum(answers[index] for index in run) for run in runs]
        packed = pack(lengths, tokens_per_micro_batch, multiple_of=multiple_of)
        loads = [sum(lengths[place] for place in members) for members in packed]
        busiest = sum(max(loads[start : start + multiple_of]) for start in range(0, len(loads), multiple_of))
        if found is None or busiest < found[0]:
            found = busiest, [[index for place in members for index in runs[place]] for members in packed]
    assert found is not None
    return found[1]


def _runs(
    prompts: Sequence[tuple[int, ...]], answers: Sequence[int], budget: int, num_parts: int
) -> Iterator[list[int]]:
    """Yield lists of indices with equal prompts: `num_parts` lists per prompt, or more to fit the budget."""
    for _, group in itertools.groupby(range(len(prompts)), key=prompts.__getitem__):
        members = list(group)
        for part in split_evenly(len(members), num_parts):
            run: list[int] = []
            filled = 0
            for index in members[part.start : part.stop]:
                if run and filled + answers[index] > budget:
                    yield run
                    run = []
                if not run:
                    filled = len(prompts[index])
                run.append(index)
                filled += answers[index]
            yield run


def _spread(lengths: Sequence[int], order: Sequence[int], count: int, budget: int) -> list[list[int]] | None:
    """Return `count` micro-batches, putting each index of `order` into the emptiest, or None if one does not fit."""
    emptiest = [(0, place) for place in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in order:
        filled, place = emptiest[0]
        if filled and filled + lengths[index] > budget:
            return None
        bins[place].append(index)
        heapq.heapreplace(emptiest, (filled + lengths[index], place))
    return bins


def split_evenly(count: int, parts: int) -> list[range]:
    """Split range(count) into at most `parts` ranges whose sizes differ by at most one.

    >>> split_evenly(7, 3)
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    parts = min(parts, count)
    edges = [-(-count * part // parts) for part in range(parts + 1)] if parts else []
    return [range(low, high) for low, high in itertools.pairwise(edges)]
