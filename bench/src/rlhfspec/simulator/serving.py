"""Simulation of generators that prefill and decode together or apart, step by step.

A step of B sequences with P prompt tokens takes `t0 + c*B + p*P` seconds and gives each sequence a token.

Example:
    >>> costs = ServingCosts(
    ...     step_seconds=0.008, sequence_seconds=0.0005, prefill_seconds=0.0005, pause_seconds=0.01,
    ...     prompts=[PromptSeen(tokens=100, responses=[11])],
    ... )
    >>> [done] = run(costs, Placement(1, 0, chunk=50), [Arrival(0.0, 100, (11,))], rows=8)
    >>> round(done.first, 6), round(done.per_token, 6)
    (0.066, 0.0085)
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveInt

CHUNKS = (32, 128, 512, 2048)
GOOD_SHARE = 0.9  # of requests within both targets, at the goodput
MOST_MOVES = 4  # that a prefill worker makes at once
_PAUSES_BEFORE = 2  # of decoding, before the one in which a sequence moves
_LEAST_ARRIVALS, _MOST_ARRIVALS = 200, 1000
_TARGETS_LONG = 10  # arrivals last for so many times the target of the first token, so that queues show
_NUM_HALVINGS = 8


class PromptSeen(BaseModel):
    tokens: PositiveInt
    responses: list[PositiveInt] = Field(min_length=1)


class ServingCosts(BaseModel):
    """Costs and lengths that a run has learnt: `costs.json` of its folder."""

    step_seconds: NonNegativeFloat
    sequence_seconds: NonNegativeFloat
    prefill_seconds: NonNegativeFloat  # a prompt token
    pause_seconds: NonNegativeFloat  # of a move
    prompts: list[PromptSeen] = Field(min_length=1)

    def seconds(self, num_sequences: int, num_prompt_tokens: int) -> float:
        return self.step_seconds + self.sequence_seconds * num_sequences + self.prefill_seconds * num_prompt_tokens


class Placement(NamedTuple):
    num_generators: int
    num_prefilling: int  # 0: together
    chunk: int = 512  # most prompt tokens of a step

    def __str__(self) -> str:
        decoding = self.num_generators - self.num_prefilling
        return f"apart, {self.num_prefilling} + {decoding}" if self.num_prefilling else "together"


class Arrival(NamedTuple):
    at: float
    prompt_tokens: int
    responses: tuple[int, ...]  # lengths


@dataclass(slots=True, eq=False)
class SimulatedAnswer:
    arrived: float
    began: float  # time of its first token
    length: int
    left: int  # tokens, when it last joined or left a generator
    ended: float = 0.0
    where: _Engine | None = None
    last_step: int = 0  # there

    @property
    def first(self) -> float:
        """Return the time to first token."""
        return self.began - self.arrived

    @property
    def per_token(self) -> float:
        return (self.ended - self.began) / max(self.length - 1, 1)


@dataclass(slots=True, eq=False)
class _Engine:
    prompts: deque[list[Any]] = field(default_factory=deque)  # [tokens left, arrival]
    ends: list[tuple[int, int, SimulatedAnswer]] = field(default_factory=list)  # heap by last step
    staying: deque[SimulatedAnswer] = field(default_factory=deque)  # to be handed over
    num_running: int = 0
    num_steps: int = 0
    is_stepping: bool = False
    rows: int = 0  # in use or promised
    num_moves: int = 0


def run(costs: ServingCosts, placement: Placement, arrivals: Sequence[Arrival], *, rows: int) -> list[SimulatedAnswer]:
    """Return the answers to all arrivals. `rows`: sequences that a generator runs at once."""
    return list(_ServingRun(costs, placement, rows).answers(arrivals))


class _ServingRun:
    def __init__(self, costs: ServingCosts, placement: Placement, rows: int) -> None:
        self._costs, self._chunk, self._rows = costs, placement.chunk, rows
        engines = [_Engine() for _ in range(placement.num_generators)]
        self._takers = engines[: placement.num_prefilling or None]
        self._decoders = engines[placement.num_prefilling :] if placement.num_prefilling else []
        self._events: list[tuple[float, int, Any]] = []
        self._numbers = count()
        self._queue: deque[Arrival] = deque()

    def answers(self, arrivals: Sequence[Arrival]) -> Iterator[SimulatedAnswer]:
        for arrival in arrivals:
            self._at(arrival.at, arrival)
        while self._events:
            now, _, event = heapq.heappop(self._events)
            match event:
                case Arrival():
                    self._queue.append(event)
                case _Engine():
                    yield from self._end_step(event, now)
                case (source, _, answer) if answer.where is source:
                    self._leave(source, answer)
                    self._at(now + self._costs.pause_seconds, event)
                case (source, decoder, answer):
                    self._land(source, decoder, answer, now)
            self._hand_out(now)

    def _at(self, time: float, event: Any) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    def _hand_out(self, now: float) -> None:
        """Give waiting prompts to the generators that have room and the least to prefill."""
        while self._queue:
            num_rows = min(len(self._queue[0].responses), self._rows)
            having_room = [each for each in self._takers if each.rows + num_rows <= self._rows]
            if not having_room:
                return
            taker = min(having_room, key=lambda each: (sum(prompt[0] for prompt in each.prompts), each.rows))
            arrival = self._queue.popleft()
            taker.rows += len(arrival.responses)
            taker.prompts.append([arrival.prompt_tokens, arrival])
            self._begin_step(taker, now)

    def _begin_step(self, engine: _Engine, now: float) -> None:
        if engine.is_stepping or not (engine.num_running or engine.prompts):
            return
        budget = self._chunk
        for prompt in engine.prompts:
            taken = min(prompt[0], budget)
            prompt[0] -= taken
            budget -= taken
            if not budget:
                break
        engine.is_stepping = True
        self._at(now + self._costs.seconds(engine.num_running, self._chunk - budget), engine)

    def _end_step(self, engine: _Engine, now: float) -> Iterator[SimulatedAnswer]:
        engine.is_stepping = False
        engine.num_steps += 1
        while engine.prompts and not engine.prompts[0][0]:
            _, arrival = engine.prompts.popleft()
            for length in arrival.responses:
                self._join(engine, SimulatedAnswer(arrival.at, now, length, length - 1))
        while engine.ends and engine.ends[0][0] <= engine.num_steps:
            last, _, answer = heapq.heappop(engine.ends)
            if answer.where is engine and answer.last_step == last:  # else it moved
                answer.ended, answer.where, answer.left = now, None, 0
                engine.rows -= 1
                engine.num_running -= 1
                yield answer
        self._hand_over(engine, now)
        self._begin_step(engine, now)

    def _join(self, engine: _Engine, answer: SimulatedAnswer) -> None:
        answer.where, answer.last_step = engine, engine.num_steps + answer.left + engine.is_stepping
        heapq.heappush(engine.ends, (answer.last_step, next(self._numbers), answer))
        engine.num_running += 1
        if engine in self._takers:
            engine.staying.append(answer)

    def _hand_over(self, source: _Engine, now: float) -> None:
        while self._decoders and source.staying and source.num_moves < MOST_MOVES:
            decoder = min(self._decoders, key=lambda each: each.rows)
            if decoder.rows >= self._rows:
                return
            answer = source.staying.popleft()
            if answer.where is source:
                source.num_moves += 1
                decoder.rows += 1
                self._at(now + _PAUSES_BEFORE * self._costs.pause_seconds, (source, decoder, answer))

    def _leave(self, source: _Engine, answer: SimulatedAnswer) -> None:
        answer.left, answer.where = answer.last_step - source.num_steps, None
        source.num_running -= 1

    def _land(self, source: _Engine, decoder: _Engine, answer: SimulatedAnswer, now: float) -> None:
        source.num_moves -= 1
        if answer.left:
            source.rows -= 1
            self._join(decoder, answer)
            self._begin_step(decoder, now)
        else:
            decoder.rows -= 1
        self._hand_over(source, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingTargets:
    first_seconds: float  # to the first token
    token_seconds: float  # between two tokens, on average over a response

    def share(self, answers: Sequence[SimulatedAnswer]) -> float:
        """Return the share of answers within both targets."""
        good = [each.first <= self.first_seconds and each.per_token <= self.token_seconds for each in answers]
        return sum(good) / len(good)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFound:
    """Goodput of a placement with its best chunk: requests a second, `GOOD_SHARE` of which are within the targets."""

    placement: Placement
    goodput: float
    stage_seconds: float  # for all prompts of the run at once, with all their responses
    shares: tuple[tuple[float, float], ...]  # (requests a second, share of good ones)


def search(
    costs: ServingCosts, targets: ServingTargets, *, num_generators: int, rows: int, seeds: Sequence[int]
) -> list[PlacementFound]:
    """Return each placement with its best chunk, the best placement first."""
    apart = sorted({max(round(num_generators * share / 8), 1) for share in range(1, 8)} & set(range(1, num_generators)))
    found = []
    for num_prefilling in (0, *apart):
        tried = [
            _found(costs, targets, Placement(num_generators, num_prefilling, chunk), rows, seeds) for chunk in CHUNKS
        ]
        found.append(max(tried, key=lambda each: each.goodput))
    return sorted(found, key=lambda each: -each.goodput)


def _found(
    costs: ServingCosts, targets: ServingTargets, placement: Placement, rows: int, seeds: Sequence[int]
) -> PlacementFound:
    def share(rate: float) -> float:
        number = int(min(max(_TARGETS_LONG * targets.first_seconds * rate, _LEAST_ARRIVALS), _MOST_ARRIVALS))
        came = [arrivals(costs, rate, number, seed) for seed in seeds]
        return targets.share([answer for each in came for answer in run(costs, placement, each, rows=rows)])

    most = 2 * placement.num_generators / _least_seconds(costs, rows)
    low, high, seen = 0.0, most, {}
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        seen[middle] = share(middle)
        low, high = (middle, high) if seen[middle] >= GOOD_SHARE else (low, middle)
    stage = run(
        costs, placement, [Arrival(0.0, each.tokens, tuple(each.responses)) for each in costs.prompts], rows=rows
    )
    return PlacementFound(
        placement=placement,
        goodput=low,
        stage_seconds=max(answer.ended for answer in stage),
        shares=tuple(sorted(seen.items())),
    )


def _least_seconds(costs: ServingCosts, rows: int) -> float:
    """Return the seconds of one generator that a request takes at least."""
    prompt = np.mean([each.tokens for each in costs.prompts])
    response = np.mean([length for each in costs.prompts for length in each.responses])
    a_token = costs.sequence_seconds + costs.step_seconds / rows
    return max(float(costs.prefill_seconds * prompt + a_token * response), 1e-9)


def arrivals(costs: ServingCosts, rate: float, number: int, seed: int) -> list[Arrival]:
    """Draw requests, each a prompt of the run with one of its responses, at random times."""
    random = np.random.default_rng([seed, 13])
    times = np.cumsum(random.exponential(1.0, number)) / rate
    drawn = [costs.prompts[number] for number in random.integers(0, len(costs.prompts), number)]
    return [
        Arrival(time, prompt.tokens, (prompt.responses[int(random.integers(len(prompt.responses)))],))
        for time, prompt in zip(times.tolist(), drawn, strict=True)
    ]
