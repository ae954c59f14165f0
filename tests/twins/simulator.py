"""The simulator's slow twin: every generator, step by step. Example:

>>> from rlhfspec.simulator.simulator import PRESETS, Scenario, simulate, workload
>>> scenario = Scenario(num_generators=2, curve=PRESETS["adaptive"], engines_per_host=2, prefill_seconds=1e-4)
>>> work = workload("groups", num_generators=2, per_generator=8, seed=1)
>>> simulate_slowly(scenario, work).seconds == simulate(scenario, work).seconds
True
"""

from dataclasses import dataclass, field

import numpy as np

from rlhfspec.simulator.lengths import Ints, Workload
from rlhfspec.simulator.scenario import (
    NANOSECONDS,
    FleetSnapshot,
    MoveMade,
    Policy,
    Scenario,
    StageOutcome,
    initial_hands,
    learnt_curves,
    nanoseconds,
    step_tables,
)

LIFE, BOUNDARY, ARRIVAL, LANDING, PLAN = range(5)


@dataclass(slots=True, kw_only=True)
class _Engine:
    number: int
    hand: list[int]
    boundary: int | None = 0  # when its step ends; None: it has nothing to do
    running: list[int] = field(default_factory=list)
    joining: list[int] = field(default_factory=list)
    leaving: list[int] = field(default_factory=list)
    prefilled: set[int] = field(default_factory=set)
    begins: int = 0  # its step, after prefill
    leased: int = 0
    life: int = 0
    is_alive: bool = True


@dataclass(slots=True, kw_only=True)
class _SimulatedSequence:
    number: int
    generated: int = 0
    place: str = "queue"  # queue, hand, running, moving, joining, done
    trip: tuple[_Engine, int, _Engine, int] | None = None
    left: int = 0


def simulate_slowly(
    scenario: Scenario, work: Workload, policy: Policy | None = None, *, order: Ints | None = None
) -> StageOutcome:
    return _Oracle(scenario, work, policy, np.arange(work.num_sequences) if order is None else order).run()


class _Oracle:
    def __init__(self, scenario: Scenario, work: Workload, policy: Policy | None, order: Ints) -> None:
        self.scenario, self.work, self.policy = scenario, work, policy
        hands, self.queue = initial_hands(scenario, work, order)
        self.engines = [_Engine(number=number, hand=hand) for number, hand in enumerate(hands)]
        self.sequences = [_SimulatedSequence(number=number) for number in range(work.num_sequences)]
        for hand in hands:
            for number in hand:
                self.sequences[number].place = "hand"
        factors = dict(scenario.slowness)
        tables = step_tables(scenario, scenario.rows)
        self.tables = [tables[factors.get(number, 1.0)] for number in range(scenario.num_generators)]
        self.outcome = StageOutcome(
            num_tokens=int(work.lengths.sum()),
            ended=np.zeros(work.num_sequences, dtype=np.int64),
            ended_on=np.full(work.num_sequences, -1, dtype=np.int64),
        )
        self.things: list[tuple[int, int, int, object]] = []  # all that is not a step's end
        for number, kill in enumerate(scenario.kills):
            self.things.append((nanoseconds(kill.at_seconds), LIFE, number, False))
            if kill.back_after_seconds is not None:
                self.things.append((nanoseconds(kill.at_seconds + kill.back_after_seconds), LIFE, number, True))
        if policy is not None:
            self.things.append((nanoseconds(scenario.plan_seconds), PLAN, 0, None))
        self.has_news = True
        self.just_ended: list[int] = []
        self.moved_at: dict[int, float] = {}

    def run(self) -> StageOutcome:
        while any(sequence.place != "done" for sequence in self.sequences):
            steps = [(e.boundary, BOUNDARY, e.number, None) for e in self.engines if e.boundary is not None]
            time, kind, number, detail = min([*steps, *self.things], key=lambda thing: thing[:3])
            if kind != BOUNDARY:
                self.things.remove((time, kind, number, detail))
            if kind == BOUNDARY:
                self.step_ends(self.engines[number], time)
            elif kind == LANDING:
                self.land(self.sequences[number], time)
            elif kind == PLAN:
                self.plan(time)
            elif kind == ARRIVAL:
                assert isinstance(detail, list)
                self.queue[:0] = detail
                self.wake(*self.engines, time=time)
            else:
                self.live_or_die(self.engines[self.scenario.kills[number].generator], bool(detail), time)
        self.outcome.seconds = float(self.outcome.ended.max()) / NANOSECONDS
        return self.outcome

    def wake(self, *engines: _Engine, time: int) -> None:
        for engine in engines:
            if engine.is_alive and engine.boundary is None:
                engine.boundary = time

    def step_ends(self, engine: _Engine, time: int) -> None:
        for number in sorted(engine.running):
            sequence = self.sequences[number]
            sequence.generated += 1
            if sequence.generated == self.work.lengths[number]:
                engine.running.remove(number)
                sequence.place = "done"
                self.outcome.ended[number] = time
                self.outcome.ended_on[number] = engine.number
                self.has_news = True
                self.just_ended.append(number)
        stall = self.leave(engine, time) + self.join(engine) + self.start(engine)
        if not engine.running:
            engine.boundary = None
            return
        engine.begins = time + stall
        size = self.scenario.engines_per_host
        first = engine.number // size * size
        neighbours = [other for other in self.engines[first : first + size] if other is not engine and other.running]
        engine.boundary = engine.begins + self.tables[engine.number][len(neighbours)][len(engine.running)]

    def leave(self, engine: _Engine, time: int) -> int:
        stall = 0
        for number in engine.leaving:
            sequence = self.sequences[number]
            _, _, destination, life = sequence.trip
            if sequence.place == "done" or destination.life != life:
                self.cancel(sequence, time)
                continue
            pause = 0.0
            if sequence.place == "running":
                engine.running.remove(number)
                engine.leased += 1
                stall += self.cpu(sequence)
                pause = self.scenario.pause_seconds + self.scenario.pause_token_seconds * self.held(sequence)
            else:
                engine.hand.remove(number)
            sequence.place, sequence.left = "moving", time
            self.things.append((time + nanoseconds(pause), LANDING, number, None))
        engine.leaving.clear()
        return stall

    def held(self, sequence: _SimulatedSequence) -> int:
        return sequence.generated + int(self.work.prompt_tokens[sequence.number]) if sequence.generated else 0

    def cpu(self, sequence: _SimulatedSequence) -> int:
        return nanoseconds(self.scenario.move_seconds + self.scenario.move_token_seconds * self.held(sequence))

    def cancel(self, sequence: _SimulatedSequence, time: int) -> None:
        _, _, destination, life = sequence.trip
        sequence.trip = None
        self.outcome.num_refused += 1
        if destination.life == life:
            destination.leased -= 1
            if self.queue or destination.hand:
                self.wake(destination, time=time)

    def join(self, engine: _Engine) -> int:
        stall = 0
        for number in engine.joining:
            sequence = self.sequences[number]
            engine.leased -= 1
            if sequence.generated:
                stall += self.cpu(sequence)
                sequence.place = "running"
                engine.running.append(number)
            else:
                sequence.place = "hand"
                engine.hand.insert(0, number)
        engine.joining.clear()
        return stall

    def start(self, engine: _Engine) -> int:
        stall = 0
        prefetch = self.scenario.prefetch if self.scenario.pulls else 0
        piece = self.scenario.piece if self.scenario.pulls else 1
        enough = self.free(engine) + prefetch - len(engine.hand) >= piece
        while enough and self.queue and self.free(engine) + prefetch > len(engine.hand):
            number = self.queue.pop(0)
            self.sequences[number].place = "hand"
            engine.hand.append(number)
        while engine.hand and self.free(engine) > 0:
            number = engine.hand.pop(0)
            self.sequences[number].place = "running"
            engine.running.append(number)
            prompt = int(self.work.prompts[number])
            if not (self.scenario.shares_prefixes and prompt in engine.prefilled):
                stall += int(self.work.prompt_tokens[number]) * nanoseconds(self.scenario.prefill_seconds)
            engine.prefilled.add(prompt)
        return stall

    def free(self, engine: _Engine) -> int:
        return self.scenario.rows - len(engine.running) - engine.leased

    def land(self, sequence: _SimulatedSequence, time: int) -> None:
        source, source_life, destination, life = sequence.trip
        sequence.trip = None
        here = destination if destination.life == life else source if source.life == source_life else None
        if here is None:
            self.redeliver([sequence.number], time)
            return
        if here is destination:
            if sequence.generated and source.life == source_life:
                source.leased -= 1
                if self.queue or source.hand:
                    self.wake(source, time=time)
            self.moved_at[sequence.number] = time / NANOSECONDS
            ends = {"source": source.number, "destination": destination.number}
            when = {"left_seconds": sequence.left / NANOSECONDS, "landed_seconds": time / NANOSECONDS}
            made = MoveMade(sequence=sequence.number, num_tokens=self.held(sequence), **ends, **when)
            self.outcome.moves.append(made)
        elif not sequence.generated:
            source.leased += 1
        sequence.place = "joining"
        here.joining.append(sequence.number)
        self.has_news = True
        self.wake(here, time=time)

    def live_or_die(self, engine: _Engine, comes_back: bool, time: int) -> None:
        if comes_back:
            engine.is_alive = True
            self.wake(engine, time=time)
            return
        if not engine.is_alive:
            return
        engine.is_alive, engine.boundary = False, None
        engine.life += 1
        for number in engine.leaving:
            self.cancel(self.sequences[number], time)
        lost = sorted([*engine.running, *engine.hand, *engine.joining])
        for held in (engine.running, engine.hand, engine.joining, engine.leaving):
            held.clear()
        engine.prefilled.clear()
        engine.leased = 0
        self.redeliver(lost, time)

    def redeliver(self, numbers: list[int], time: int) -> None:
        if numbers:
            self.outcome.num_redelivered += len(numbers)
            for number in numbers:
                self.sequences[number].generated, self.sequences[number].place = 0, "queue"
            later = time + nanoseconds(self.scenario.redelivery_seconds)
            self.things.append((later, ARRIVAL, numbers[0], numbers))

    def plan(self, time: int) -> None:
        self.things.append((time + nanoseconds(self.scenario.plan_seconds), PLAN, 0, None))
        if not self.has_news:
            return
        self.has_news = False
        snapshot = self.snapshot(time)
        self.just_ended.clear()
        self.outcome.num_plans += 1
        chosen, destinations = self.policy(snapshot, time / NANOSECONDS)
        for number, place in zip(snapshot.ids[chosen].tolist(), destinations.tolist(), strict=True):
            self.send(self.sequences[number], self.engines[place])

    def send(self, sequence: _SimulatedSequence, destination: _Engine) -> None:
        holders = [engine for engine in self.engines if sequence.number in [*engine.running, *engine.hand]]
        free = self.free(destination)
        if not holders or sequence.trip or holders[0] is destination or not destination.is_alive or free <= 0:
            self.outcome.num_refused += 1
            return
        destination.leased += 1
        sequence.trip = (holders[0], holders[0].life, destination, destination.life)
        holders[0].leaving.append(sequence.number)

    def snapshot(self, time: int) -> FleetSnapshot:
        seen: list[tuple[int, int]] = []
        for engine in self.engines:
            seen += [(engine.number, number) for number in [*engine.running, *engine.hand, *engine.joining]]
        stays = [pair for pair in seen if self.sequences[pair[1]].trip is None]
        going = [(sequence.trip[2].number, sequence.number) for sequence in self.sequences if sequence.trip is not None]
        places = sorted([*stays, *going])
        ids = np.array([number for _, number in places], dtype=np.int64)
        those = [self.sequences[number] for number in ids]
        generated = np.array([sequence.generated for sequence in those], dtype=np.int64)
        waits = np.array([not sequence.generated and sequence.place != "running" for sequence in those], dtype=bool)
        prompts = self.work.prompt_tokens[ids]
        owed = np.array([max(each.begins - time, 0) / NANOSECONDS if each.running else 0 for each in self.engines])
        generator = np.array([place for place, _ in places], dtype=np.int64)
        np.add.at(owed, generator[waits], prompts[waits] * self.scenario.prefill_seconds)
        busy, alone = learnt_curves(self.scenario, self.work)
        return FleetSnapshot(
            generator=generator,
            ids=ids,
            generated=generated,
            held=np.where(waits, 0, generated + prompts),
            moved_at=np.array([self.moved_at.get(number, -np.inf) for number in ids.tolist()]),
            is_moving=np.array(
                [sequence.trip is not None or sequence.place == "joining" for sequence in those], dtype=bool
            ),
            step_seconds=busy[0],
            sequence_seconds=busy[1],
            alone_step_seconds=alone[0],
            alone_sequence_seconds=alone[1],
            prefill_owed=owed,
            free_rows=np.array([self.free(engine) - len(engine.hand) for engine in self.engines]),
            is_alive=np.array([engine.is_alive for engine in self.engines]),
            host=np.arange(len(self.engines)) // self.scenario.engines_per_host,
            ended=self.work.lengths[self.just_ended],
        )
