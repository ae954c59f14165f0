"""Result of a plan with its reasons, as arrays and as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhfspec.common.arrays import BoolArray, Floats
from rlhfspec.moves.rebalancing.fleet import Ints

BALANCE, LEAVING, CLOSING = range(3)  # reasons of a move
MOVED, ALIKE, BOUND, NO_GAIN, NONE_MAY, NO_PLACE = range(6)  # outcomes of a pair
Name = Callable[[int], str]


@dataclass(frozen=True, slots=True)
class Verdicts:
    source: Ints
    destination: Ints  # -1: no generator has room
    later: Floats  # seconds until the source is done
    earlier: Floats
    verdict: Ints


@dataclass(frozen=True, slots=True)
class PlannedMoves:
    """Planned moves [P] as fleet indices, end times [N] before and after, and the outcome of each pair."""

    sequence: Ints
    source: Ints
    destination: Ints
    gain: Floats  # seconds by which the later end becomes earlier; 0: the sequence must go anyway
    why: Ints
    verdicts: Verdicts
    before: Floats
    after: Floats
    is_closing: BoolArray  # should be empty
    num_kept: Ints  # engines of its host that should run; 0: no advice
    dry: Ints  # idle generators
    advice: tuple[str, ...]  # for each idle generator: consolidate | score | learn | wait

    @property
    def num_moves(self) -> int:
        return len(self.sequence)

    def why_move(self, move: int, name: Name = str) -> str:
        source, destination = int(self.source[move]), int(self.destination[move])
        there = f"{self.before[destination]:.2f} s"
        if self.why[move] == LEAVING:
            return f"{name(source)} is leaving; {name(destination)} ends in {there}"
        ends = f"{name(source)} ends in {self.before[source]:.2f} s, {name(destination)} in {there}"
        if self.why[move] == CLOSING:
            return f"this host is faster with only {self.num_kept[source]} of its engines; {ends}"
        return f"{ends}; the move lets the later one end {self.gain[move]:.2f} s earlier"

    def why_not(self, most: int = 8, name: Name = str) -> list[str]:
        stays = np.flatnonzero(self.verdicts.verdict != MOVED)
        seen: dict[int, str] = {}
        for index in stays[np.argsort(-self.verdicts.later[stays], kind="stable")].tolist():
            source = int(self.verdicts.source[index])
            if source not in seen and len(seen) < most:
                seen[source] = self._why_stays(index, name)
        return list(seen.values())

    def _why_stays(self, index: int, name: Name) -> str:
        all_of = self.verdicts
        source, destination = name(int(all_of.source[index])), int(all_of.destination[index])
        verdict, later, earlier = int(all_of.verdict[index]), float(all_of.later[index]), float(all_of.earlier[index])
        if verdict == NO_PLACE:
            return f"{source}: no generator has room for what it has to hand over"
        ends = f"{source} ends in {later:.2f} s, {name(destination)} in {earlier:.2f} s"
        return f"{ends}: {_VERDICT_WORDS[verdict]}"


_VERDICT_WORDS = {
    ALIKE: "too near to each other",
    BOUND: "steps take as long with fewer sequences, so nothing is gained",
    NO_GAIN: "every sequence would end later there",
    NONE_MAY: "sequences that could move have just moved, or do not fit",
}


class Notes:
    def __init__(self) -> None:
        self._moves: list[tuple[Ints, Ints, Ints, Floats, Ints]] = []
        self._pairs: list[tuple[Ints, Ints, Floats, Floats, Ints]] = []

    def moves(self, sequence: Ints, source: Ints, destination: Ints, gain: Floats, why: int) -> None:
        self._moves.append((sequence, source, destination, gain, np.full(len(sequence), why)))

    def pairs(self, source: Ints, destination: Ints, later: Floats, earlier: Floats, verdict: Ints) -> None:
        self._pairs.append((source, destination, later, earlier, verdict))

    def unplaced(self, source: int) -> None:
        nowhere, never = np.array([-1]), np.array([np.inf])
        self._pairs.append((np.array([source]), nowhere, never, never, np.array([NO_PLACE])))

    def planned(
        self, before: Floats, after: Floats, is_closing: BoolArray, num_kept: Ints, dry: Ints, advice: tuple[str, ...]
    ) -> PlannedMoves:
        sequence, source, destination, gain, why = (_joined(self._moves, index) for index in range(5))
        verdicts = Verdicts(*(_joined(self._pairs, index) for index in range(5)))
        return PlannedMoves(
            sequence, source, destination, gain, why, verdicts, before, after, is_closing, num_kept, dry, advice
        )


def _joined(rows: Sequence[tuple[Any, ...]], column: int) -> Any:
    return np.concatenate([row[column] for row in rows]) if rows else np.zeros(0, np.int64)
