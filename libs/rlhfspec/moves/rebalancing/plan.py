"""Planner of moves between generators.

An engine ends after `F = t0 * longest + c * sum + prefill owed`. Each of four rounds pairs the latest and the earliest
engine of a weights version, and moves the sequence that most lowers the later end. So plans cannot oscillate.

>>> fleet = Fleet.of(
...     step_seconds=[1e-3] * 2, sequence_seconds=[5e-4] * 2, generator=[0, 0], remaining=[300.0, 200.0]
... )
>>> planned = plan(fleet, now=0.0)
>>> planned.sequence.tolist(), planned.destination.tolist(), planned.gain.round(2).tolist()
([1], [1], [0.1])
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from rlhfspec.common.arrays import BoolArray, Floats
from rlhfspec.moves.rebalancing.fleet import (
    STANDARD,
    Fleet,
    Ints,
    PlannerSettings,
    members_of,
    segment_maxima,
    segment_sums,
)
from rlhfspec.moves.rebalancing.hosts import engines_to_run
from rlhfspec.moves.rebalancing.planned import (
    ALIKE,
    BALANCE,
    BOUND,
    CLOSING,
    LEAVING,
    MOVED,
    NO_GAIN,
    NONE_MAY,
    Notes,
    PlannedMoves,
)

_A_LITTLE = 1e-4  # of an end; smaller gains are ignored
_MOST_HANDED_OVER = 4096  # per plan
_Entry = tuple[float, float, int, int]  # a generator: its end, two tie breakers, its index


def plan(fleet: Fleet, now: float, settings: PlannerSettings = STANDARD) -> PlannedMoves:
    """Plan moves; `now` is in seconds on the clock of `fleet.moved_at`."""
    state = _State(fleet, now, settings)
    state.hand_over(fleet.is_leaving, LEAVING, state.version)
    if state.is_closing.any():
        state.hand_over(state.is_closing, CLOSING, _joint(state.version, fleet.host))
    for is_first in (index == 0 for index in range(settings.num_rounds)):
        if not state.balance(is_first):
            break
    return state.planned()


class _Pairs(NamedTuple):
    source: Ints
    destination: Ints

    def where(self, chosen: BoolArray) -> _Pairs:
        return _Pairs(self.source[chosen], self.destination[chosen])


class _State:
    def __init__(self, fleet: Fleet, now: float, settings: PlannerSettings) -> None:
        self.fleet, self.settings = fleet, settings
        running = engines_to_run(fleet, settings)
        self.step, self.sequence = running.step_seconds, running.sequence_seconds
        self.is_closing, self.num_kept = running.is_closing, running.num_kept
        self.version = fleet.weights_version
        self.group = _joint(self.version, running.apart)  # generators that may be paired share a group
        self.starts = fleet.starts
        self.total = segment_sums(fleet.remaining, self.starts)
        self.longest = segment_maxima(fleet.remaining, self.starts)
        self.ends = self.step * self.longest + self.sequence * self.total + fleet.prefill_owed
        self.before = self.ends.copy()
        self.longest_come = np.zeros(fleet.num_generators)  # of sequences that moved here
        self.num_sequences = np.diff(self.starts)
        self.rows, self.tokens = fleet.free_rows.copy(), fleet.free_tokens.copy()
        self.remaining = fleet.remaining.copy()  # 0: it has moved
        self.need = fleet.held + fleet.remaining  # tokens of KV at its end
        self.may_move = now - fleet.moved_at >= settings.rest_seconds
        self.notes = Notes()

    def balance(self, is_first: bool) -> bool:
        """Plan one round, at most one move per pair; return False if nothing moved."""
        pairs = self._pairs()
        later, earlier = self.ends[pairs.source], self.ends[pairs.destination]
        differ = later - earlier > self._least(later)
        pays = self._most_gain(pairs) > self._least(later) / 2
        if is_first:
            why_not = np.where(differ, BOUND, ALIKE)
            stays = ~(differ & pays)
            apart = pairs.where(stays)
            self.notes.pairs(apart.source, apart.destination, later[stays], earlier[stays], why_not[stays])
        had_any = self.starts[pairs.source + 1] > self.starts[pairs.source]  # new arrivals do not move again
        pairs = pairs.where(differ & pays & had_any)
        return bool(len(pairs.source)) and self._move_one_each(pairs)

    def _pairs(self) -> _Pairs:
        stays = self.fleet.takes_part & ~self.is_closing
        sources = np.flatnonzero(stays & (self.num_sequences > 0))
        places = np.flatnonzero(stays & (self.rows > 0) & (self.tokens > 0))
        sources = sources[np.argsort(-self.ends[sources], kind="stable")]
        # Ties in the end (idle engines): first the faster engine, then the one with more room.
        places = places[np.lexsort((-self.tokens[places], self.sequence[places], self.ends[places]))]
        if (self.group == self.group[:1]).all():
            number = min(len(sources), len(places))
            pairs = _Pairs(sources[:number], places[:number])
        else:
            sources = sources[np.argsort(self.group[sources], kind="stable")]
            places = places[np.argsort(self.group[places], kind="stable")]
            _, left, right = np.intersect1d(
                _ranked(self.group[sources]), _ranked(self.group[places]), assume_unique=True, return_indices=True
            )
            pairs = _Pairs(sources[left], places[right])
        return pairs.where(self.ends[pairs.source] > self.ends[pairs.destination])

    def _least(self, later: Floats) -> Floats:
        return np.maximum(self.settings.least_share * later, self.settings.least_pauses * self.settings.pause_seconds)

    def _most_gain(self, pairs: _Pairs) -> Floats:
        """Return, per pair of generators, an upper bound of the seconds by which a move lets it finish earlier."""
        source, destination = pairs.source, pairs.destination
        longest = self.longest[source]
        sharing = (self.ends[source] - self.ends[destination]) / 2
        stays = np.minimum(sharing, self.sequence[source] * (self.total[source] - longest))
        there = self._end_with(destination, longest)
        return np.maximum(stays, self.ends[source] - there)

    def _end_with(self, place: Ints, remaining: Floats) -> Floats:
        longest = np.maximum(self.longest[place], remaining)
        work = self.sequence[place] * (self.total[place] + remaining)
        return self.step[place] * longest + work + self.fleet.prefill_owed[place] + self.settings.pause_seconds

    def _move_one_each(self, pairs: _Pairs) -> bool:
        order = np.argsort(pairs.source)
        pairs = _Pairs(pairs.source[order], pairs.destination[order])
        source, destination = pairs.source, pairs.destination
        members, counts = members_of(self.starts, source)
        remaining = self.remaining[members]
        worse = self._later_end(pairs, counts, remaining)
        ruled_out = ~self.may_move[members]
        if (self.tokens[destination] < (1 << 30)).any():
            ruled_out |= self.need[members] > np.repeat(self.tokens[destination], counts)
        worse[ruled_out] = np.inf
        offsets = np.concatenate(([0], np.cumsum(counts)))
        best = np.minimum.reduceat(worse, offsets[:-1])
        later = self.ends[source]
        gains = best < later * (1 - _A_LITTLE)
        picked = self._shortest_of_best(members, worse, np.where(gains, best, -1.0), counts)
        moving = pairs.where(gains)
        verdict = np.where(gains, MOVED, np.where(np.isinf(best), NONE_MAY, NO_GAIN))
        self.notes.pairs(source, destination, later, self.ends[destination], verdict)
        if not len(picked):
            return False
        self.notes.moves(members[picked], moving.source, moving.destination, (later - best)[gains], BALANCE)
        came = remaining[picked]
        remaining[picked] = 0.0
        self.longest[source] = np.maximum(segment_maxima(remaining, offsets), self.longest_come[source])
        self._go(members[picked], moving, came)
        return True

    def _later_end(self, pairs: _Pairs, counts: Ints, remaining: Floats) -> Floats:
        """Return for each sequence a lower bound of when both generators of its pair are done if it moves."""
        source, destination = pairs.source, pairs.destination
        here = np.repeat(self.ends[source], counts)
        here -= np.repeat(self.sequence[source], counts) * remaining
        there = np.maximum(np.repeat(self.longest[destination], counts), remaining)
        there *= np.repeat(self.step[destination], counts)
        there += np.repeat(self.sequence[destination], counts) * remaining
        fixed = self.sequence[destination] * self.total[destination] + self.fleet.prefill_owed[destination]
        there += np.repeat(fixed + self.settings.pause_seconds, counts)
        return np.maximum(here, there, out=here)

    def _shortest_of_best(self, members: Ints, worse: Floats, best: Floats, counts: Ints) -> Ints:
        """Return each gaining pair's sequence that moves its later end to `best`; ties prefer the shorter context."""
        hits = np.flatnonzero(worse == np.repeat(best, counts))
        pair = np.repeat(np.arange(len(counts)), counts)[hits]
        if len(hits) > (best >= 0).sum():
            order = np.lexsort((self.fleet.held[members[hits]], pair))
            hits, pair = hits[order], pair[order]
        return hits[np.concatenate(([True], pair[1:] != pair[:-1]))] if len(hits) else hits

    def _go(self, sequences: Ints, pairs: _Pairs, came: Floats) -> None:
        source, destination = pairs.source, pairs.destination
        need = np.ceil(self.need[sequences]).astype(np.int64)
        self.remaining[sequences], self.may_move[sequences] = 0.0, False
        self.total[source] -= came
        self.total[destination] += came
        self.longest[destination] = np.maximum(self.longest[destination], came)
        self.longest_come[destination] = np.maximum(self.longest_come[destination], came)
        self.num_sequences[source] -= 1
        self.num_sequences[destination] += 1
        self.rows[destination] -= 1
        self.tokens[destination] -= need
        for place in (source, destination):
            work = self.step[place] * self.longest[place] + self.sequence[place] * self.total[place]
            self.ends[place] = work + self.fleet.prefill_owed[place]

    def hand_over(self, is_source: BoolArray, why: int, group: Ints) -> None:
        """Move the sources' sequences, longest first, each to its group's earliest ending generator with room.

        `why` is the reason to record, LEAVING or CLOSING.
        """
        chosen = self._handed_over(is_source)
        if not len(chosen):
            return
        stays = np.flatnonzero(self.fleet.takes_part & ~self.is_closing & (self.rows > 0))
        heaps: dict[int, list[_Entry]] = {}
        for place in stays.tolist():
            heaps.setdefault(int(group[place]), []).append(self._entry(place))
        for heap in heaps.values():
            heapq.heapify(heap)
        for sequence in chosen.tolist():
            source = int(self.fleet.generator[sequence])
            self._hand_one_over(sequence, source, heaps.get(int(group[source]), []), why)
        self.longest = np.maximum(segment_maxima(self.remaining, self.starts), self.longest_come)
        self.ends = self.step * self.longest + self.sequence * self.total + self.fleet.prefill_owed

    def _handed_over(self, is_source: BoolArray) -> Ints:
        sequences = (
            np.flatnonzero(is_source[self.fleet.generator] & self.may_move) if is_source.any() else np.zeros(0, int)
        )
        generator = self.fleet.generator[sequences]
        order = np.lexsort((-self.remaining[sequences], generator))
        rank = _ranks(generator[order])
        sequences = sequences[order][rank < self.settings.moves_of_leaving]
        return sequences[np.argsort(-self.remaining[sequences], kind="stable")][:_MOST_HANDED_OVER]

    def _hand_one_over(self, sequence: int, source: int, heap: list[_Entry], why: int) -> None:
        need = int(np.ceil(self.need[sequence]))
        passed = []
        while heap:
            entry = heapq.heappop(heap)
            place = entry[-1]
            if self.tokens[place] >= need:
                came = float(self.remaining[sequence])
                which = [np.array([number]) for number in (sequence, source, place)]
                self.notes.moves(which[0], which[1], which[2], np.zeros(1), why)
                self._go(which[0], _Pairs(which[1], which[2]), np.array([came]))
                if self.rows[place] > 0:
                    heapq.heappush(heap, self._entry(place))
                break
            passed.append(entry)
        else:
            self.notes.unplaced(source)
        for entry in passed:
            heapq.heappush(heap, entry)

    def _entry(self, place: int) -> _Entry:
        return float(self.ends[place]), float(self.sequence[place]), -int(self.tokens[place]), place

    def planned(self) -> PlannedMoves:
        dry = np.flatnonzero((self.num_sequences == 0) & ~self.fleet.is_leaving)
        return self.notes.planned(self.before, self.ends, self.is_closing, self.num_kept, dry, self._advice(dry))

    def _advice(self, dry: Ints) -> tuple[str, ...]:
        """Return for each idle generator score, wait, learn or consolidate; if several may score, one learns."""
        latest = float(self.ends.max(initial=0.0))
        goes_on = latest > self.settings.scoring_seconds or not latest  # all are idle: they wait for other stages
        free = [place for place in dry if not self.is_closing[place]]
        told = dict.fromkeys(dry, "consolidate") | dict.fromkeys(free, "score" if goes_on else "wait")
        if self.settings.learns:
            learners = [place for place in free if self.fleet.takes_part[place]]
            told |= dict.fromkeys(learners[: len(free) > 1] if goes_on else learners, "learn")
        return tuple(told[place] for place in dry)


def _ranks(groups: Ints) -> Ints:
    return np.arange(len(groups)) - np.searchsorted(groups, groups)


def _ranked(groups: Ints) -> Ints:
    return groups * (1 << 32) + _ranks(groups)


def _joint(versions: Ints, hosts: Ints) -> Ints:
    if (versions == versions[:1]).all() and (hosts == hosts[:1]).all():
        return np.zeros(len(versions), np.int64)
    _, joint = np.unique(np.stack((versions, hosts)), axis=1, return_inverse=True)
    return np.asarray(joint).reshape(-1)
