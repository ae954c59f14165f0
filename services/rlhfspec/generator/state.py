"""State of one generator between engine steps: plain queues without engine, tasks or clock."""

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
    """Prompt in the engine, kept in progress until its sample is published or moved."""

    delivery: Delivery[Prompt]
    before: float  # `GeneratorState` counted so many seconds when it came, less what it took of other engines


class GeneratorState:
    """Queues of one generator: pulled prompts, running samples, wanted weights, and the rebalancer's plan.

    Only the generator's loop removes from it. An arrival sets `news`, which ends a wait and a burst. Prompts are pulled
    as the engine has room, and `prefetch` more, a `piece` at a time.

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
        self.queued: deque[Delivery[Prompt]] = deque()  # just come, or before their weights
        self.has_room = asyncio.Event()  # for a piece
        self.running: dict[str, RunningSample] = {}
        self.wanted: list[Weights] = []  # versions that were announced since the engine last loaded any
        self.is_to_score = False  # while it has no prompts, as the latest plan says
        self._worker = worker
        self._prefetch = prefetch
        self._piece = piece
        self._room = 0  # prompts that may still be pulled
        self._seconds_each = 0.0  # of all work so far, what fell to each sample that was there

    def pulled(self, arrived: Sequence[Delivery[Prompt]]) -> None:
        self.queued.extend(arrived)
        self._set_room(self._room - len(arrived))
        self.news.set()

    def announced(self, record: Weights) -> None:
        if record.role == "policy":
            self.wanted.append(record)
            self.news.set()

    def planned(self, plan: Plan) -> None:
        """Follow a plan; set `news` if it differs from the last."""
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
        """Take the prompts that may be sampled under this version. Moving samples wait."""
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
        """Count a sample as running. A redelivered one continues. `so_far`: seconds spent on other engines."""
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
