"""Arms (policies compared): which sequences of a stage go to which generator, and when.

Example:
    >>> pulled = Pulled(8, at_once=3)
    >>> pulled.first(), pulled.more(1, 2), pulled.more(0, 1)
    ([[0, 2, 4], [1, 3, 5]], [6, 7], [])
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from rlhfspec.bench.moving.pair import NUM_GENERATORS

DEALT, PULLED, OURS, CLAIRVOYANT = "dealt", "pulled", "ours", "clairvoyant"
ARMS = (DEALT, PULLED, OURS, CLAIRVOYANT)
PULLED_AT_ONCE = 16


class Arm(Protocol):
    def first(self) -> list[list[int]]:
        """Return, by generator, the indices of the sequences that it begins with."""
        ...

    def more(self, number: int, num_finished: int) -> list[int]:
        """Return the indices of sequences that generator `number` gets after `num_finished` of its own ended."""
        ...


class Placed:
    """Arm that sends every sequence to the generator given by `placement` at the start."""

    def __init__(self, placement: tuple[int, ...]) -> None:
        self._placement = placement

    def first(self) -> list[list[int]]:
        return [[i for i, at in enumerate(self._placement) if at == number] for number in range(NUM_GENERATORS)]

    def more(self, number: int, num_finished: int) -> list[int]:
        return []


class Pulled:
    """Arm in which each generator holds `at_once` sequences and pulls another as one ends."""

    def __init__(self, count: int, at_once: int = PULLED_AT_ONCE) -> None:
        self._waiting = deque(range(count))
        self._at_once = at_once

    def first(self) -> list[list[int]]:
        ahead = [self._waiting.popleft() for _ in range(min(NUM_GENERATORS * self._at_once, len(self._waiting)))]
        return [ahead[number::NUM_GENERATORS] for number in range(NUM_GENERATORS)]

    def more(self, number: int, num_finished: int) -> list[int]:
        return [self._waiting.popleft() for _ in range(min(num_finished, len(self._waiting)))]
