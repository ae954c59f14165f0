"""State of the memory transport per subject."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rlhfspec.messages.transport.base import Consumer, Kind

Waiters = set[asyncio.Future[None]]


@dataclass(slots=True)
class Stored:
    number: int  # of publication; defines the order of delivery
    id: str
    data: bytes
    headers: Mapping[str, str]
    owed: dict[str, int]  # number of deliveries by consumer that has yet to acknowledge


class ConsumerQueue:
    """Queue of one consumer; an unacknowledged message is in exactly one of ready, held and delayed."""

    def __init__(self, subject: WorkSubject, consumer: Consumer) -> None:
        self.subject = subject
        self.consumer = consumer
        self.ready: list[int] = []  # heap of message numbers; acknowledged ones are skipped
        self.held: dict[int, float] = {}  # acknowledgement deadline by number
        self.delayed: dict[int, float] = {}  # time of redelivery by number
        self.waiters: Waiters = set()

    def is_owed(self, number: int) -> bool:
        stored = self.subject.stored.get(number)
        return stored is not None and self.consumer.name in stored.owed

    def make_ready(self, number: int) -> None:
        heapq.heappush(self.ready, number)
        wake(self.waiters)

    def next_ready(self) -> Stored | None:
        while self.ready:
            number = heapq.heappop(self.ready)
            if self.is_owed(number):
                return self.subject.stored[number]
        return None

    def forget(self, number: int) -> None:
        self.delayed.pop(number, None)
        if self.held.pop(number, None) is not None:
            wake(self.waiters)


class Ids:
    """Published ids, oldest first; ids of kept messages never expire."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, id: str, kept: Collection[Stored], num_remembered: int) -> None:
        self._known[id] = None
        if len(self._known) > 2 * max(num_remembered, len(kept)):
            staying = {stored.id for stored in kept}.union(list(self._known)[-num_remembered:])
            self._known = {id: None for id in self._known if id in staying}


class WorkSubject:
    kind: Kind = "work"

    def __init__(self, name: str, consumers: Iterable[Consumer]) -> None:
        self.name = name
        self.num_published = 0
        self.stored: dict[int, Stored] = {}  # oldest first
        self.queues = {consumer.name: ConsumerQueue(self, consumer) for consumer in consumers}
        self.ids = Ids()
        self.waiters: Waiters = set()  # for room
        self.watchers: list[SubjectWatcher] = []

    def put(self, stored: Stored) -> None:
        if not self.queues:
            return  # no consumer will ever read it
        self.stored[stored.number] = stored
        for queue in self.queues.values():
            queue.make_ready(stored.number)

    def settle(self, queue: ConsumerQueue, number: int) -> None:
        """Mark the message as handled by one consumer, and delete it after the last one."""
        queue.forget(number)
        stored = self.stored[number]
        del stored.owed[queue.consumer.name]
        if not stored.owed:
            del self.stored[number]
            wake(self.waiters)

    @property
    def behind(self) -> list[str]:
        """Return the consumers that have yet to acknowledge the oldest message."""
        return list(next(iter(self.stored.values())).owed)


class LatestSubject:
    """State subject, which keeps the latest message of each key, or signal subject, which keeps none."""

    def __init__(self, name: str, kind: Kind) -> None:
        self.name = name
        self.kind = kind
        self.num_published = 0
        self.latest: dict[str, Stored] = {}  # by key, oldest first
        self.ids = Ids()
        self.watchers: list[SubjectWatcher] = []

    def put(self, key: str, stored: Stored, max_keys: int) -> None:
        self.latest.pop(key, None)
        self.latest[key] = stored
        if len(self.latest) > max_keys:
            del self.latest[next(iter(self.latest))]


class SubjectWatcher:
    """Unread messages of a watcher, oldest first; only the latest of each key."""

    def __init__(self, subject: WorkSubject | LatestSubject, unread: dict[str, Stored]) -> None:
        self.subject = subject
        self.unread = unread
        self.waiters: Waiters = set()

    def add(self, key: str, stored: Stored, most: int) -> None:
        self.unread.pop(key, None)
        self.unread[key] = stored
        if len(self.unread) > most:
            del self.unread[next(iter(self.unread))]
        wake(self.waiters)


def new_message(
    subject: WorkSubject | LatestSubject, data: bytes, id: str, headers: Mapping[str, str], owed: dict[str, int]
) -> Stored:
    subject.num_published += 1
    return Stored(subject.num_published, id, data, dict(headers), owed)


def wake(waiters: Waiters) -> None:
    for woken in waiters:
        if not woken.done():
            woken.set_result(None)
