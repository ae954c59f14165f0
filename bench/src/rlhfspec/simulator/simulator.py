"""Discrete-event simulator of a stage: sequences start, end and move.

All sequences of a generator advance by one token per step, so a sequence ends at a step count known at its start, and
nothing is computed between events. `tests/twins/simulator.py` does the same one step at a time.

Simultaneous events are ordered by kind, then number. Generators act between steps; events in mid-step wait for its end.

Example:
    >>> scenario = Scenario(num_generators=2, curve=PRESETS["t0=2.5c"])
    >>> work = workload("skew", num_generators=2, per_generator=32, seed=1)
    >>> outcome = simulate(scenario, work)
    >>> outcome.num_tokens == int(work.lengths.sum()), outcome.moves
    (True, [])
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from rlhfspec.errors import InvalidRequest
from rlhfspec.simulator.lengths import Ints, Workload, workload
from rlhfspec.simulator.scenario import NANOSECONDS, MoveMade, Policy, Scenario, StageOutcome, nanoseconds
from rlhfspec.simulator.simulator_state import DONE, MOVING, RUNNING, WAITING, SimulatorState
from rlhfspec.simulator.step_curves import PRESETS

__all__ = ["PRESETS", "Scenario", "simulate", "workload"]

LIFE, BOUNDARY, ARRIVAL, LANDING, PLAN = range(5)  # kinds of events, in their order at one moment


def simulate(
    scenario: Scenario,
    work: Workload,
    policy: Policy | None = None,
    *,
    order: Ints | None = None,
    records: bool = False,
) -> StageOutcome:
    """Simulate one stage, starting sequences in `order`; `records` also keeps the outcome's timeline."""
    return _Simulation(scenario, work, policy, order, records).run()


class _Simulation(SimulatorState):
    def __init__(
        self, scenario: Scenario, work: Workload, policy: Policy | None, order: Ints | None, records: bool
    ) -> None:
        super().__init__(scenario, work, order)
        self.policy, self.records = policy, records

    # -- the loop

    def run(self) -> StageOutcome:
        self.events: list[tuple[int, int, int, Any]] = [
            (0, BOUNDARY, generator, 0) for generator in range(self.scenario.num_generators)
        ]
        self.next_event = [0] * self.scenario.num_generators
        for number, kill in enumerate(self.scenario.kills):
            self.events.append((nanoseconds(kill.at_seconds), LIFE, number, False))
            if kill.back_after_seconds is not None:
                back = nanoseconds(kill.at_seconds + kill.back_after_seconds)
                self.events.append((back, LIFE, number, True))
        if self.policy is not None:
            self.events.append((nanoseconds(self.scenario.plan_seconds), PLAN, 0, None))
        heapify(self.events)
        now = 0
        while self.num_open:
            now, kind, number, detail = self._next()
            if kind == BOUNDARY:
                if detail == self.version[number]:
                    self._boundary(number, now, kind)
            elif kind == PLAN:
                self._plan(now)
            elif kind == LANDING:
                self._land(number, now)
            elif kind == ARRIVAL:
                self._arrive(detail, now)
            else:
                self._live_or_die(self.scenario.kills[number].generator, now, detail)
        self.outcome.seconds = float(self.outcome.ended.max(initial=0)) / NANOSECONDS
        return self.outcome

    def _next(self) -> tuple[int, int, int, Any]:
        while self.events:
            if self.events[0][1] != PLAN or len(self.events) > 1:
                return heappop(self.events)
            break
        raise InvalidRequest("kill", self.num_open, "sequences are left when every generator is dead")

    # -- between two steps of a generator

    def _boundary(self, generator: int, now: int, kind: int) -> None:
        """End a generator's step, if one runs; sequences end, leave, join and start; then begin the next step."""
        was_running = self.running[generator]
        if was_running and now > self.begun[generator]:
            self.steps[generator] += (now - self.begun[generator]) // self.step_ns[generator]
        if not self.is_alive[generator]:
            return
        self._end(generator, now)
        stall = self._leave(generator, now) + self._join(generator) + self._start(generator)
        if bool(was_running) != bool(self.running[generator]):
            self._tell_host(generator, now, kind, 1 if self.running[generator] else -1)
        self._go_on(generator, now, stall)
        if self.records and was_running != self.running[generator]:
            self.outcome.timeline.append((now / NANOSECONDS, generator, self.running[generator]))

    def _end(self, generator: int, now: int) -> None:
        ends, steps = self.ends[generator], self.steps[generator]
        while ends and ends[0][0] <= steps:
            end, sequence = heappop(ends)
            if self._is_here(generator, end, sequence):
                self.state[sequence] = DONE
                self.outcome.ended[sequence] = now
                self.outcome.ended_on[sequence] = generator
                self.running[generator] -= 1
                self.num_open -= 1
                self.has_news = True
                self.just_ended.append(sequence)

    def _is_here(self, generator: int, end: int, sequence: int) -> bool:
        return bool(
            self.state[sequence] == RUNNING and self.where[sequence] == generator and self.ends_at[sequence] == end
        )

    def _leave(self, generator: int, now: int) -> int:
        stall = 0
        for sequence in self.leaving[generator]:
            _, _, destination, life = self.trips[sequence]
            gone = self.state[sequence] == DONE
            if gone or self.life[destination] != life or not self.is_alive[destination]:
                self._cancel(sequence, now)
                continue
            if self.state[sequence] == RUNNING:
                self.remaining[sequence] = self.ends_at[sequence] - self.steps[generator]
                self.running[generator] -= 1
                self.leased[generator] += 1  # its row is kept until the destination has it
                tokens = self._held(sequence)
                stall += self._move_ns(tokens)
                pause = self.scenario.pause_seconds + self.scenario.pause_token_seconds * tokens
                lands = now + nanoseconds(pause)
            else:
                self.hands[generator].remove(sequence)
                lands = now
            self.state[sequence] = MOVING
            self.left[sequence] = now
            heappush(self.events, (lands, LANDING, sequence, None))
        self.leaving[generator].clear()
        return stall

    def _held(self, sequence: int) -> int:
        """Return the number of tokens in the KV of a sequence that is not running."""
        generated = int(self.work.lengths[sequence] - self.remaining[sequence])
        return generated + self.prompt_tokens[sequence] if generated else 0

    def _move_ns(self, tokens: int) -> int:
        return nanoseconds(self.scenario.move_seconds + self.scenario.move_token_seconds * tokens)

    def _cancel(self, sequence: int, now: int) -> None:
        """Cancel a move that did not begin, and free the destination's row."""
        _, _, destination, life = self.trips.pop(sequence)
        self.outcome.num_refused += 1
        if self.life[destination] == life and self.is_alive[destination]:
            self.leased[destination] -= 1
            self._wake(destination, now)

    def _join(self, generator: int) -> int:
        stall = 0
        for sequence in self.joining[generator]:
            self.leased[generator] -= 1
            tokens = self._held(sequence)
            if tokens:
                stall += self._move_ns(tokens)
                self._run(generator, sequence)
            else:
                self.state[sequence] = WAITING
                self.hands[generator].appendleft(sequence)
        self.joining[generator].clear()
        return stall

    def _run(self, generator: int, sequence: int) -> None:
        end = self.steps[generator] + int(self.remaining[sequence])
        self.state[sequence] = RUNNING
        self.where[sequence] = generator
        self.ends_at[sequence] = end
        self.running[generator] += 1
        heappush(self.ends[generator], (end, sequence))

    def _start(self, generator: int) -> int:
        """Pull sequences and start them while rows are free; return the nanoseconds of prefill."""
        hand = self.hands[generator]
        free = self.scenario.rows - self.running[generator] - self.leased[generator]
        room = free + (self.scenario.prefetch if self.scenario.pulls else 0) - len(hand)
        if self.scenario.pulls and room < self.scenario.piece:
            room = 0
        while self.queue and room > 0:
            sequence = self.queue.popleft()
            self.where[sequence] = generator
            hand.append(sequence)
            room -= 1
        stall = 0
        while hand and free > 0:
            sequence = hand.popleft()
            stall += self._prefill(generator, sequence)
            self._run(generator, sequence)
            free -= 1
        return stall

    def _prefill(self, generator: int, sequence: int) -> int:
        if self.scenario.shares_prefixes:
            if self.prompts[sequence] in self.prefilled[generator]:
                return 0
            self.prefilled[generator].add(self.prompts[sequence])
        return self.prompt_tokens[sequence] * self.prompt_ns

    def _go_on(self, generator: int, now: int, stall: int) -> None:
        """Begin the next step after `stall` nanoseconds, and schedule the event of the next sequence to end."""
        self.version[generator] += 1
        self.next_event[generator] = -1
        self.begun[generator] = now
        if not self.running[generator]:
            return
        self.begun[generator] = now + stall
        neighbours = self.host_busy[generator // self.scenario.engines_per_host] - 1
        step = self.step_ns[generator] = self.table[generator][neighbours][self.running[generator]]
        ends = self.ends[generator]
        while not self._is_here(generator, *ends[0]):
            heappop(ends)
        self._schedule(generator, self.begun[generator] + (ends[0][0] - self.steps[generator]) * step)

    def _schedule(self, generator: int, time: int) -> None:
        if self.next_event[generator] < 0 or time < self.next_event[generator]:
            self.next_event[generator] = time
            heappush(self.events, (time, BOUNDARY, generator, self.version[generator]))

    def _tell_host(self, generator: int, now: int, kind: int, change: int) -> None:
        """Add `change` to the host's busy engines, and reschedule its other generators."""
        size = self.scenario.engines_per_host
        first = generator // size * size
        self.host_busy[generator // size] += change
        for neighbour in range(first, min(first + size, self.scenario.num_generators)):
            if neighbour != generator and self.running[neighbour]:
                is_later = kind == LIFE or (kind == BOUNDARY and neighbour > generator)
                self._request(neighbour, now, or_now=is_later)

    def _wake(self, generator: int, now: int) -> None:
        """Schedule the generator if a sequence may be waiting for a row."""
        if self.queue or self.hands[generator]:
            self._request(generator, now)

    def _request(self, generator: int, now: int, *, or_now: bool = False) -> None:
        """Schedule the generator at the next end of a step after `now`; `or_now` allows one at `now`."""
        if not self.running[generator]:
            self._schedule(generator, now)
            return
        begun, step = self.begun[generator], self.step_ns[generator]
        done = -((begun - now) // step) if or_now else (now - begun) // step + 1
        self._schedule(generator, begun + max(done, 1) * step)

    # -- moves

    def _plan(self, now: int) -> None:
        assert self.policy is not None
        heappush(self.events, (now + nanoseconds(self.scenario.plan_seconds), PLAN, 0, None))
        if not self.has_news:
            return
        self.has_news = False
        self.outcome.num_plans += 1
        snapshot = self.snapshot(now)
        self.just_ended.clear()
        chosen, destinations = self.policy(snapshot, now / NANOSECONDS)
        for sequence, destination in zip(snapshot.ids[chosen].tolist(), destinations.tolist(), strict=True):
            self._send(sequence, destination, now)

    def _send(self, sequence: int, destination: int, now: int) -> None:
        """Lease a row at the destination or refuse the move; the sequence leaves when its source's step ends."""
        source = int(self.where[sequence])
        free = self.scenario.rows - self.running[destination] - self.leased[destination]
        can_go = self.state[sequence] in (WAITING, RUNNING) and sequence not in self.trips and source != destination
        if not can_go or not self.is_alive[destination] or free <= 0:
            self.outcome.num_refused += 1
            return
        self.leased[destination] += 1
        self.trips[sequence] = (source, self.life[source], destination, self.life[destination])
        self.leaving[source].append(sequence)
        self._request(source, now)

    def _land(self, sequence: int, now: int) -> None:
        """Land a moved sequence, at its source if the destination died; redeliver it if both died."""
        source, source_life, destination, life = self.trips.pop(sequence)
        source_lives = self.life[source] == source_life
        lands = self.life[destination] == life
        had_row = self._held(sequence) > 0
        left = self.left.pop(sequence)
        if not lands and not source_lives:
            self._redeliver([sequence], now)
            return
        if lands:
            if had_row and source_lives:
                self.leased[source] -= 1
                self._wake(source, now)
            self.moved_at[sequence] = now / NANOSECONDS
            self.outcome.moves.append(
                MoveMade(
                    sequence=sequence,
                    source=source,
                    destination=destination,
                    left_seconds=left / NANOSECONDS,
                    landed_seconds=now / NANOSECONDS,
                    num_tokens=self._held(sequence),
                )
            )
        elif not had_row:
            self.leased[source] += 1
        here = destination if lands else source
        self.where[sequence] = here
        self.joining[here].append(sequence)
        self.has_news = True
        self._request(here, now)

    # -- death

    def _live_or_die(self, generator: int, now: int, comes_back: bool) -> None:
        if comes_back:
            self.is_alive[generator] = True
            self._request(generator, now)
            return
        if not self.is_alive[generator]:
            return
        self.is_alive[generator] = False
        self.life[generator] += 1
        for sequence in self.leaving[generator]:
            self._cancel(sequence, now)
        here = np.flatnonzero((self.where == generator) & (self.state != DONE)).tolist()
        lost = [sequence for sequence in here if sequence not in self.left]
        if self.running[generator]:
            self.running[generator] = 0
            self._tell_host(generator, now, LIFE, -1)
        for kept in (self.hands, self.ends, self.leaving, self.joining, self.prefilled):
            kept[generator].clear()
        self.leased[generator] = 0
        self.version[generator] += 1
        self.next_event[generator] = -1
        if self.records:
            self.outcome.timeline.append((now / NANOSECONDS, generator, 0))
        self._redeliver(lost, now)

    def _redeliver(self, sequences: list[int], now: int) -> None:
        """Queue lost sequences again from their first token, after the redelivery delay."""
        if not sequences:
            return
        self.outcome.num_redelivered += len(sequences)
        self.state[sequences] = WAITING
        self.where[sequences] = -1
        self.remaining[sequences] = self.work.lengths[sequences]
        later = now + nanoseconds(self.scenario.redelivery_seconds)
        heappush(self.events, (later, ARRIVAL, sequences[0], sequences))

    def _arrive(self, sequences: list[int], now: int) -> None:
        self.queue.extendleft(reversed(sequences))
        for generator in range(self.scenario.num_generators):
            if self.is_alive[generator]:
                self._request(generator, now)
