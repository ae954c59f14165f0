"""Generator state between engine steps: plain queues without engine, tasks or clock."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from rlhfspec.engine.base import EngineStats
from rlhfspec.messages.records import Plan, Prompt, Weights
from rlhfspec.stage.bus import Delivery, Held


@dataclass(slots=True)
class RunningSample:
    """Prompt in the engine, leased until its sample is published or moved."""

    delivery: Delivery[Prompt]
    before: float  # `_seconds_each` at arrival, less the seconds on other engines


class GeneratorState:
    """Queues of one generator: pulled prompts, running samples, wanted weights, and the rebalancer's plan.

    Only the generator's loop removes entries. An arrival sets `news`, which ends a wait and a burst. Prompts are pulled
    a `piece` at a time, up to the engine's room and `prefetch` more.

    >>> from types import SimpleNamespace as Fake
    >>> a, b = (Fake(record=Fake(id=id)) for id in "ab")
    >>> state = GeneratorState(worker=0, prefetch=4, piece=1)
    >>> state.begin(a); state.worked(1.0)
    >>> state.begin(b, so_far=3.0); state.worked(1.0)
    >>> state.seconds_of("a"), state.end("b")[1]
    (1.5, 3.5)
    """

    def __init__(self, *, worker: int, prefetch: int, piece: int) -> None:
        self.news = asyncio.Event()
        self.queued: deque[Delivery[Prompt]] = deque()  # new, or waiting for their weights
        self.has_room = asyncio.Event()  # for a piece
        self.running: dict[str, RunningSample] = {}
        self.wanted: list[Weights] = []  # announced since the last load
        self.is_to_score = False  # while idle, by the latest plan
        self._worker = worker
        self._prefetch = prefetch
        self._piece = piece
        self._room = 0  # prompts that may still be pulled
        self._seconds_each = 0.0  # share of all work so far per running sample

    def pulled(self, arrived: Sequence[Delivery[Prompt]]) -> None:
        self.queued.extend(arrived)
        self._set_room(self._room - len(arrived))
        self.news.set()

    def announced(self, record: Weights) -> None:
        if record.role == "policy":
            self.wanted.append(record)
            self.news.set()

    def planned(self, plan: Plan) -> None:
        is_to_score = plan.dry.get(self._worker) == "score"
        if is_to_score != self.is_to_score:
            self.is_to_score = is_to_score
            self.news.set()

    @property
    def waits_for(self) -> str:
        if not self.queued:
            return "prompts"
        return f"weights version {min(delivery.record.weights_version for delivery in self.queued)}"

    def look_for_room(self, stats: EngineStats) -> None:
        self._set_room(stats.room + self._prefetch - stats.num_waiting - len(self.queued))

    def take_ready(self, version: int, moving: Collection[str]) -> list[Delivery[Prompt]]:
        """Remove and return queued prompts that weights `version` may sample, except those in `moving`."""
        ready: list[Delivery[Prompt]] = []
        waiting: deque[Delivery[Prompt]] = deque()
        for delivery in self.queued:
            waits = delivery.record.weights_version > version or delivery.record.id in moving
            (waiting if waits else ready).append(delivery)
        self.queued = waiting
        return ready

    def _set_room(self, room: int) -> None:
        self._room = room
        if room >= self._piece:
            self.has_room.set()
        else:
            self.has_room.clear()

    def begin(self, delivery: Delivery[Prompt], so_far: float = 0.0) -> None:
        """Track a running sample; a redelivery keeps its time. `so_far`: seconds on other engines."""
        running = self.running.get(delivery.record.id)
        before = self._seconds_each - so_far if running is None else running.before
        self.running[delivery.record.id] = RunningSample(delivery, before)

    def worked(self, seconds: float) -> None:
        self._seconds_each += seconds / max(len(self.running), 1)

    def seconds_of(self, sample_id: str) -> float:
        return self._seconds_each - self.running[sample_id].before

    def end(self, sample_id: str) -> tuple[Delivery[Prompt], float]:
        seconds = self.seconds_of(sample_id)
        return self.running.pop(sample_id).delivery, seconds

    def held(self) -> Iterator[Held]:
        yield from (delivery.held for delivery in self.queued)
        yield from (running.delivery.held for running in self.running.values())
