"""State of the simulator, and the part of it that a policy sees.

Example:
    >>> from rlhfspec.simulator.lengths import workload
    >>> from rlhfspec.simulator.step_curves import PRESETS
    >>> work = workload("groups", num_generators=2, per_generator=8, seed=1)
    >>> state = SimulatorState(Scenario(num_generators=2, curve=PRESETS["plain"]), work)
    >>> state.snapshot(0).generator.tolist() == [0] * 8 + [1] * 8
    True
"""

from __future__ import annotations

from collections import deque

import numpy as np

from rlhfspec.simulator.lengths import Ints, Workload
from rlhfspec.simulator.scenario import (
    NANOSECONDS,
    FleetSnapshot,
    Scenario,
    StageOutcome,
    initial_hands,
    learnt_curves,
    nanoseconds,
    step_tables,
)

WAITING, RUNNING, MOVING, DONE = range(4)  # states of a sequence; waiting: in a hand or in the queue


class SimulatorState:
    """Generators and sequences between two events."""

    def __init__(self, scenario: Scenario, work: Workload, order: Ints | None = None) -> None:
        self.scenario, self.work = scenario, work
        count, size = scenario.num_generators, work.num_sequences
        self.outcome = StageOutcome(
            num_tokens=int(work.lengths.sum()),
            ended=np.zeros(size, dtype=np.int64),
            ended_on=np.full(size, -1, dtype=np.int64),
        )
        order = np.arange(size) if order is None else order
        hands, queue = initial_hands(scenario, work, order)
        self.hands = [deque(hand) for hand in hands]
        self.queue = deque(queue)
        # of generators
        self.begun = [0] * count  # start of the step after `steps`; in the future during prefill
        self.steps = [0] * count
        self.step_ns = [1] * count
        self.running = [0] * count
        self.leased = [0] * count  # rows kept for sequences on their way here, or from here
        self.is_alive = [True] * count
        self.life = [0] * count  # how often it died
        self.version = [0] * count  # an event of an older version is void
        self.next_event = [-1] * count
        self.ends: list[list[tuple[int, int]]] = [[] for _ in range(count)]  # heaps of (count of steps, sequence)
        self.joining: list[list[int]] = [[] for _ in range(count)]
        self.leaving: list[list[int]] = [[] for _ in range(count)]
        self.prefilled: list[set[int]] = [set() for _ in range(count)]
        self.host_busy = [0] * (count // scenario.engines_per_host + 1)
        factors = dict(scenario.slowness)
        tables = step_tables(scenario, scenario.rows)
        self.table = [tables[factors.get(generator, 1.0)] for generator in range(count)]
        self.learnt, self.learnt_alone = learnt_curves(scenario, work)
        # of sequences
        self.where = np.full(size, -1, dtype=np.int64)
        self.state = np.full(size, WAITING, dtype=np.int8)
        self.ends_at = np.zeros(size, dtype=np.int64)
        self.remaining = work.lengths.astype(np.int64).copy()  # of those that do not run
        self.moved_at = np.full(size, -np.inf)
        self.trips: dict[int, tuple[int, int, int, int]] = {}  # by sequence: source, its life, destination, its life
        self.left: dict[int, int] = {}  # of those on their way: when they left
        for generator, hand in enumerate(hands):
            self.where[hand] = generator
        self.num_open = size
        self.has_news = True
        self.just_ended: list[int] = []
        self.prompt_ns = nanoseconds(scenario.prefill_seconds)
        self.prompt_tokens: list[int] = work.prompt_tokens.tolist()
        self.prompts: list[int] = work.prompts.tolist()

    def snapshot(self, now: int) -> FleetSnapshot:
        count = self.scenario.num_generators
        running, begun = np.array(self.running), np.array(self.begun)
        passed = np.where(running > 0, np.maximum(now - begun, 0) // np.array(self.step_ns), 0)
        steps = np.array(self.steps) + passed
        where = self.where.copy()
        going = list(self.trips)
        where[going] = [trip[2] for trip in self.trips.values()]
        ids = np.flatnonzero((self.state != DONE) & (where >= 0))
        ids = ids[np.argsort(where[ids], kind="stable")]
        remaining = self.remaining[ids]
        runs = self.state[ids] == RUNNING
        remaining[runs] = (self.ends_at[ids] - steps[self.where[ids]])[runs]
        generated = self.work.lengths[ids] - remaining
        waits = ~runs & (generated == 0)
        prompts = self.work.prompt_tokens[ids]
        is_moving = self.state == MOVING
        is_moving[going] = True
        owed = np.maximum(begun - now, 0) / NANOSECONDS * (running > 0)
        owed += np.bincount(where[ids[waits]], prompts[waits], count) * self.scenario.prefill_seconds
        return FleetSnapshot(
            generator=where[ids],
            ids=ids,
            generated=generated,
            held=np.where(waits, 0, generated + prompts),
            moved_at=self.moved_at[ids],
            is_moving=is_moving[ids],
            step_seconds=self.learnt[0],
            sequence_seconds=self.learnt[1],
            alone_step_seconds=self.learnt_alone[0],
            alone_sequence_seconds=self.learnt_alone[1],
            prefill_owed=owed,
            free_rows=self.scenario.rows - running - np.array(self.leased) - [len(hand) for hand in self.hands],
            is_alive=np.array(self.is_alive),
            host=np.arange(count) // self.scenario.engines_per_host,
            ended=self.work.lengths[self.just_ended],
        )
