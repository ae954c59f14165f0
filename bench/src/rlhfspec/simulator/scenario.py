"""Inputs and outcomes of a simulated stage, shared by the simulator, its slow reference and the tables.

Time is counted in whole nanoseconds, so that a step's end has one exact value.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from rlhfspec.common.arrays import BoolArray, Floats
from rlhfspec.simulator.lengths import Ints, Workload
from rlhfspec.simulator.step_curves import StepCurve

NANOSECONDS = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """Death of a generator; its sequences are redelivered from their first token."""

    generator: int
    at_seconds: float
    back_after_seconds: float | None = None  # None: it never comes back


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Generators, costs and deaths of a simulated stage. Default costs of moves were measured over shared memory."""

    num_generators: int
    curve: StepCurve
    rows: int = 256  # sequences that a generator runs at once
    pulls: bool = False  # prompts are pulled as there is room; else all are dealt at the start
    prefetch: int = 0  # prompts that a generator holds beyond its rows, when it pulls
    piece: int = 1  # room needed before it pulls
    prefill_seconds: float = 0.0  # a prompt token
    shares_prefixes: bool = True  # a prompt is prefilled once for all its samples on one generator
    engines_per_host: int = 1
    slowness: tuple[tuple[int, float], ...] = ()  # (generator, times as long a step)
    kills: tuple[Kill, ...] = ()
    redelivery_seconds: float = 1.0
    plan_seconds: float = 0.25  # between two plans
    pause_seconds: float = 0.005  # of a move: no generator runs the sequence; the destination's step comes on top
    pause_token_seconds: float = 0.0
    move_seconds: float = 0.0003  # of CPU that each end loses
    move_token_seconds: float = 5e-7


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """State that a policy sees. Sequences are sorted by generator; a moving one counts at its destination."""

    generator: Ints
    ids: Ints  # of the sequences, in the workload
    generated: Ints
    held: Ints  # tokens in KV; 0: it waits for a row
    moved_at: Floats  # -inf: never
    is_moving: BoolArray
    step_seconds: Floats  # [N] t0 and c, as they would have been learnt while the host's other engines run
    sequence_seconds: Floats
    alone_step_seconds: Floats
    alone_sequence_seconds: Floats
    prefill_owed: Floats
    free_rows: Ints
    is_alive: BoolArray
    host: Ints
    ended: Ints  # lengths of those that ended since the last snapshot


# (snapshot, now in seconds) -> sequences (places in the snapshot) and where they go
Policy = Callable[[FleetSnapshot, float], tuple[Ints, Ints]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveMade:
    sequence: int
    source: int
    destination: int
    left_seconds: float
    landed_seconds: float
    num_tokens: int


@dataclass(slots=True, kw_only=True)
class StageOutcome:
    seconds: float = 0.0  # until the last sequence ended
    num_tokens: int = 0
    ended: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [S] nanoseconds
    ended_on: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [S] generators
    moves: list[MoveMade] = field(default_factory=list)
    num_refused: int = 0  # moves that found no row, or nothing to move
    num_plans: int = 0
    num_redelivered: int = 0
    timeline: list[tuple[float, int, int]] = field(default_factory=list)  # (seconds, generator, sequences running)

    @property
    def num_swings(self) -> int:
        """Return the number of moves back to a generator although no sequence had ended on either generator since."""
        swings = 0
        for out, back in self._returns():
            since, until = out.left_seconds * NANOSECONDS, back.left_seconds * NANOSECONDS
            there = np.isin(self.ended_on, (out.source, back.source))
            swings += not bool((there & (self.ended > since) & (self.ended <= until)).any())
        return swings

    def _returns(self) -> list[tuple[MoveMade, MoveMade]]:
        """Return pairs: a sequence's move away from a generator, and its move back."""
        left: dict[tuple[int, int], MoveMade] = {}
        returns = []
        for move in self.moves:
            if (move.sequence, move.destination) in left:
                returns.append((left[move.sequence, move.destination], move))
            left[move.sequence, move.source] = move
        return returns


def step_tables(scenario: Scenario, most: int) -> dict[float, list[list[int]]]:
    """Return the nanoseconds of a step by [slowness factor][busy neighbours on the host][running sequences]."""
    neighbours = scenario.engines_per_host - 1
    tables: dict[float, list[list[int]]] = {}
    for factor in {1.0, *(factor for _, factor in scenario.slowness)}:
        rows = [scenario.curve.table(most, busy_share=busy / max(neighbours, 1)) for busy in range(neighbours + 1)]
        tables[factor] = [np.maximum(np.rint(row * factor * NANOSECONDS), 1).astype(np.int64).tolist() for row in rows]
    return tables


Curves = tuple[Floats, Floats]  # [N], [N]: t0 and c


def learnt_curves(scenario: Scenario, work: Workload) -> tuple[Curves, Curves]:
    """Return the (t0, c) that generators would learn while all engines of their host are busy, and alone."""
    most = max(min(scenario.rows, 2 * -(-work.num_sequences // scenario.num_generators)), 2)
    slowness = np.ones(scenario.num_generators)
    for generator, factor in scenario.slowness:
        slowness[generator] = factor
    busy = scenario.curve.fitted(most, busy_share=1.0 if scenario.engines_per_host > 1 else 0.0)
    alone = scenario.curve.fitted(most)
    return (busy[0] * slowness, busy[1] * slowness), (alone[0] * slowness, alone[1] * slowness)


def nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)


def initial_hands(scenario: Scenario, work: Workload, order: Ints) -> tuple[list[list[int]], list[int]]:
    """Return the sequences that each generator holds at first, and the queue of those to be pulled."""
    hands: list[list[int]] = [[] for _ in range(scenario.num_generators)]
    if not scenario.pulls:
        for sequence in order.tolist():
            hands[work.dealt[sequence]].append(sequence)
        return hands, []
    queue, most = deque(order.tolist()), scenario.rows + scenario.prefetch
    while queue and len(hands[-1]) < most:
        for hand in hands:
            for _ in range(min(scenario.piece, most - len(hand), len(queue))):
                hand.append(queue.popleft())
    return hands, list(queue)
