"""The slow planner, one pair at a time, with the moves of `plan`. `hosts` says which engines close."""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, inf

from rlhfspec.moves.rebalancing.fleet import STANDARD, Fleet, PlannerSettings
from rlhfspec.moves.rebalancing.hosts import engines_to_run

_A_LITTLE = 1e-4


@dataclass
class _OracleSequence:
    index: int
    remaining: float
    held: int
    may_move: bool

    @property
    def need(self) -> int:
        return ceil(self.held + self.remaining)


@dataclass
class _OracleGenerator:
    index: int
    step: float
    per_sequence: float
    owed: float
    rows: int
    tokens: int
    version: int
    host: int
    apart: int
    is_leaving: bool
    is_closing: bool
    sequences: list[_OracleSequence] = field(default_factory=list)

    def end(self, *more: float) -> float:
        lengths = [*(sequence.remaining for sequence in self.sequences), *more]
        return self.step * max(lengths, default=0.0) + self.per_sequence * sum(lengths) + self.owed

    def earliness(self) -> tuple[float, float, int]:
        return self.end(), self.per_sequence, -self.tokens

    @property
    def stays(self) -> bool:
        return not (self.is_leaving or self.is_closing)

    def give(self, sequence: _OracleSequence, place: "_OracleGenerator") -> tuple[int, int, int]:
        self.sequences.remove(sequence)
        place.sequences.append(sequence)
        place.rows -= 1
        place.tokens -= sequence.need
        sequence.may_move = False
        return sequence.index, self.index, place.index


def plan_slowly(fleet: Fleet, now: float, settings: PlannerSettings = STANDARD) -> list[tuple[int, int, int]]:
    generators = _generators(fleet, now, settings)
    leaving = [generator for generator in generators if generator.is_leaving]
    moves = _hand_over(leaving, generators, settings, lambda one, other: one.version == other.version)
    closing = [generator for generator in generators if generator.is_closing]
    moves += _hand_over(closing, generators, settings, lambda a, b: (a.version, a.host) == (b.version, b.host))
    for _ in range(settings.num_rounds):
        pairs = sorted(_pairs(generators), key=lambda pair: pair[0].index)
        made = [move for source, place in pairs for move in _best_move(source, place, settings)]
        if not made:
            break
        moves += made
    return moves


def _generators(fleet: Fleet, now: float, settings: PlannerSettings) -> list[_OracleGenerator]:
    running = engines_to_run(fleet, settings)
    generators = [
        _OracleGenerator(
            index,
            float(running.step_seconds[index]),
            float(running.sequence_seconds[index]),
            float(fleet.prefill_owed[index]),
            int(fleet.free_rows[index]),
            int(fleet.free_tokens[index]),
            int(fleet.weights_version[index]),
            int(fleet.host[index]),
            int(running.apart[index]),
            bool(fleet.is_leaving[index]),
            bool(running.is_closing[index]) and not bool(fleet.is_leaving[index]),
        )
        for index in range(fleet.num_generators)
    ]
    for index, generator in enumerate(fleet.generator.tolist()):
        may_move = now - float(fleet.moved_at[index]) >= settings.rest_seconds
        sequence = _OracleSequence(index, float(fleet.remaining[index]), int(fleet.held[index]), may_move)
        generators[generator].sequences.append(sequence)
    return generators


def _hand_over(
    sources: list[_OracleGenerator],
    generators: list[_OracleGenerator],
    settings: PlannerSettings,
    is_of_group: Callable[[_OracleGenerator, _OracleGenerator], bool],
) -> list[tuple[int, int, int]]:
    chosen: list[tuple[_OracleSequence, _OracleGenerator]] = []
    for source in sources:
        able = [sequence for sequence in source.sequences if sequence.may_move]
        able.sort(key=lambda sequence: -sequence.remaining)
        chosen += [(sequence, source) for sequence in able[: settings.moves_of_leaving]]
    moves = []
    for sequence, source in sorted(chosen, key=lambda pair: -pair[0].remaining):
        places = [place for place in generators if place.stays and is_of_group(source, place)]
        places = [place for place in places if place.rows > 0 and place.tokens >= sequence.need]
        if places:
            moves.append(source.give(sequence, min(places, key=_OracleGenerator.earliness)))
    return moves


def _pairs(generators: list[_OracleGenerator]) -> list[tuple[_OracleGenerator, _OracleGenerator]]:
    pairs = []
    for group in {(generator.version, generator.apart) for generator in generators}:
        staying = [each for each in generators if each.stays and (each.version, each.apart) == group]
        sources = sorted((one for one in staying if one.sequences), key=lambda one: -one.end())
        places = sorted((one for one in staying if one.rows > 0 and one.tokens > 0), key=_OracleGenerator.earliness)
        pairs += [pair for pair in zip(sources, places, strict=False) if pair[0].end() > pair[1].end()]
    return pairs


def _best_move(
    source: _OracleGenerator, place: _OracleGenerator, settings: PlannerSettings
) -> list[tuple[int, int, int]]:
    later, pause = source.end(), settings.pause_seconds
    least = max(settings.least_share * later, settings.least_pauses * pause)
    longest = max(sequence.remaining for sequence in source.sequences)
    total = sum(sequence.remaining for sequence in source.sequences)
    if_it_stays = min((later - place.end()) / 2, source.per_sequence * (total - longest))
    if_it_goes = later - (place.end(longest) + pause)
    if later - place.end() <= least or max(if_it_stays, if_it_goes) <= least / 2:
        return []
    best, best_end = None, (later * (1 - _A_LITTLE), inf)
    for sequence in source.sequences:
        if sequence.may_move and sequence.need <= place.tokens:
            without = later - source.per_sequence * sequence.remaining
            end = max(without, place.end(sequence.remaining) + pause)
            if (end, sequence.held) < best_end and end < later * (1 - _A_LITTLE):
                best, best_end = sequence, (end, sequence.held)
    return [source.give(best, place)] if best else []
