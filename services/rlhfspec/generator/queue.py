"""Prompts that were pulled and do not run yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator

from rlhfspec.engine.base import EngineStats
from rlhfspec.messages.records import Prompt
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import Delivery, Inbox


class PromptQueue:
    """Pulls what the engine can run, and a few prompts more; all others stay where the first with room takes them.

    `prefetch`: so many more. `piece`: so many are pulled at a time.
    """

    def __init__(self, generator: Service, *, prefetch: int, piece: int) -> None:
        self._generator = generator
        self._prefetch = prefetch
        self._piece = piece
        self._room = 0  # prompts that may still be pulled
        self._has_room = asyncio.Event()  # for a piece
        self._pulled: deque[Delivery[Prompt]] = deque()  # just come, or before their weights

    def __iter__(self) -> Iterator[Delivery[Prompt]]:
        return iter(self._pulled)

    @property
    def ids(self) -> list[str]:
        return [delivery.record.id for delivery in self._pulled]

    @property
    def earliest_version(self) -> int | None:
        """The first weights that any of them waits for; None if there are none."""
        return min((delivery.record.weights_version for delivery in self._pulled), default=None)

    async def pull(self, inbox: Inbox[Prompt], come: Callable[[], None]) -> None:
        """Pull until the generator is asked to stop. `come` is called whenever some have come."""
        while not self._generator.stopping.is_set():
            await self._has_room.wait()
            pulling = inbox.pull(max_records=self._piece, timeout_seconds=PULL_SECONDS)
            if arrived := await self._generator.unless_stopped(pulling):
                self._pulled.extend(arrived)
                self._set_room(self._room - len(arrived))
                come()

    def wake(self) -> None:
        """End the wait for room, of a generator that is asked to stop."""
        self._has_room.set()

    def look_for_room(self, stats: EngineStats) -> None:
        """Between two steps of the engine, whose statistics these are."""
        self._set_room(stats.room + self._prefetch - stats.num_waiting - len(self._pulled))

    def take_ready(self, version: int, on_the_way: Collection[str]) -> list[Delivery[Prompt]]:
        """Take those that may be sampled now, under these weights; the rest stays until its weights are here."""
        ready: list[Delivery[Prompt]] = []
        waiting: deque[Delivery[Prompt]] = deque()
        for delivery in self._pulled:
            waits = delivery.record.weights_version > version or delivery.record.id in on_the_way
            (waiting if waits else ready).append(delivery)
        self._pulled = waiting
        return ready

    def _set_room(self, room: int) -> None:
        self._room = room
        if room >= self._piece:
            self._has_room.set()
        elif not self._generator.stopping.is_set():
            self._has_room.clear()
