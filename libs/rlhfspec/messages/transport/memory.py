"""In-process transport with JetStream's semantics, for one event loop.

`max_pending` limits the messages of a work subject, the keys of a state subject, and a watcher's unread messages.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Iterable, Mapping

from rlhfspec.errors import InvalidRequest, TransportClosed, TransportFull
from rlhfspec.messages.transport import dead_letters
from rlhfspec.messages.transport.base import Consumer, Kind, Message, Receipt, SeenMessage, Subscription
from rlhfspec.messages.transport.clock import Clock, SystemClock, first_of
from rlhfspec.messages.transport.memory_subjects import (
    ConsumerQueue,
    LatestSubject,
    Stored,
    SubjectWatcher,
    Waiters,
    WorkSubject,
    new_message,
    wake,
)


class MemoryTransport:
    def __init__(
        self,
        *,
        clock: Clock | None = None,
        max_pending: int = 8192,
        publish_timeout_seconds: float = 600.0,
        num_remembered_ids: int = 65536,
    ) -> None:
        self._clock: Clock = clock or SystemClock()
        self._max_pending = max_pending
        self._publish_timeout_seconds = publish_timeout_seconds
        self._num_remembered_ids = num_remembered_ids
        self._subjects: dict[str, WorkSubject | LatestSubject] = {}
        self._due: list[tuple[float, int, int, ConsumerQueue]] = []  # heap; entries no longer held are skipped
        self._order = itertools.count()
        self._due_waiters: Waiters = set()
        self._closed = False

    async def declare(self, subject: str, kind: Kind, consumers: Iterable[Consumer] = ()) -> None:
        wanted = {consumer.name: consumer for consumer in consumers}
        if kind != "work" and wanted:
            raise InvalidRequest("consumers", list(wanted), f"must be empty: {subject} is {kind}, not work")
        there = self._subjects.get(subject)
        if there is None:
            self._subjects[subject] = (
                WorkSubject(subject, wanted.values()) if kind == "work" else LatestSubject(subject, kind)
            )
        elif there.kind != kind or _consumers(there) != wanted:
            raise InvalidRequest("subject", subject, f"was declared as {there.kind} for {_consumers(there)}")

    async def publish(
        self, subject: str, data: bytes, *, id: str, key: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        found = self._declared(subject)
        if isinstance(found, WorkSubject):
            return await self._publish_work(found, data, id, headers or {})
        return self._publish_to_watchers(found, data, id, key, headers or {})

    async def subscribe(self, subject: str, consumer: Consumer) -> Subscription:
        queue = self._queue(subject, consumer.name)
        if queue.consumer != consumer:
            raise InvalidRequest("consumer", consumer, f"{subject} was declared with {queue.consumer}")
        return _Reading(self, queue)

    async def watch(self, subject: str) -> Subscription:
        found = self._declared(subject)
        watcher = SubjectWatcher(found, dict(found.latest) if isinstance(found, LatestSubject) else {})
        found.watchers.append(watcher)
        return _Reading(self, watcher)

    async def release(self, subject: str, name: str) -> None:
        queue = self._queue(subject, name)
        for number in list(queue.held):
            self._put_back(queue, number, 0.0, "its worker died")

    async def adopt(self, token: str, subject: str, name: str) -> Receipt:
        *whose, number, delivery = token.rsplit(" ", 3)
        if whose != [subject, name] or not (number.isdecimal() and delivery.isdecimal()):
            raise InvalidRequest("token", token, f"is not a delivery token of {subject} for {name}")
        return _MemoryReceipt(self, self._queue(subject, name), int(number), int(delivery))

    async def close(self) -> None:
        self._closed = True
        for subject in self._subjects.values():
            waiting = [watcher.waiters for watcher in subject.watchers]
            if isinstance(subject, WorkSubject):
                waiting += [subject.waiters, *(queue.waiters for queue in subject.queues.values())]
            for waiters in waiting:
                wake(waiters)

    async def _publish_work(self, subject: WorkSubject, data: bytes, id: str, headers: Mapping[str, str]) -> bool:
        end = self._clock.now() + self._publish_timeout_seconds
        while True:
            self._do_what_is_due()
            if id in subject.ids:
                return False
            if len(subject.stored) < self._max_pending:
                break
            if self._clock.now() >= end:
                raise TransportFull(subject.name, len(subject.stored), subject.behind, self._publish_timeout_seconds)
            await self._wait(subject.waiters, end)
            self.refuse_if_closed(subject.name)
        stored = new_message(subject, data, id, headers, dict.fromkeys(subject.queues, 0))
        subject.put(stored)
        self._show(subject, str(stored.number), stored)
        subject.ids.add(id, subject.stored.values(), self._num_remembered_ids)
        return True

    def _publish_to_watchers(
        self, feed: LatestSubject, data: bytes, id: str, key: str, headers: Mapping[str, str]
    ) -> bool:
        if feed.kind == "signal":
            stored = new_message(feed, data, id, headers, {})
            self._show(feed, str(stored.number), stored)
            return True
        if id in feed.ids:
            return False
        stored = new_message(feed, data, id, headers, {})
        feed.put(key, stored, self._max_pending)
        self._show(feed, key, stored)
        feed.ids.add(id, feed.latest.values(), self._num_remembered_ids)
        return True

    def _show(self, subject: WorkSubject | LatestSubject, key: str, stored: Stored) -> None:
        for watcher in subject.watchers:
            watcher.add(key, stored, self._max_pending)

    async def pull(self, reading: _Reading, most: int, timeout_seconds: float) -> list[Message]:
        source = reading.source
        end = self._clock.now() + timeout_seconds
        while True:
            self.refuse_if_closed(source.subject.name)
            if reading.closed:
                raise TransportClosed(source.subject.name)
            self._do_what_is_due()
            taken = self._take(source, most) if isinstance(source, ConsumerQueue) else _unread(source, most)
            if taken or self._clock.now() >= end:
                return taken
            await self._wait(source.waiters, end)

    def _take(self, queue: ConsumerQueue, most: int) -> list[Message]:
        room = min(most, queue.consumer.max_unacknowledged - len(queue.held))
        taken: list[Message] = []
        while len(taken) < room and (stored := queue.next_ready()) is not None:
            stored.owed[queue.consumer.name] += 1
            self.hold(queue, stored.number)
            taken.append(_MemoryMessage(self, queue, stored))
        return taken

    def hold(self, queue: ConsumerQueue, number: int) -> None:
        queue.held[number] = self._clock.now() + queue.consumer.ack_wait_seconds
        self._remember_due(queue.held[number], number, queue)

    def is_owed(self, queue: ConsumerQueue, number: int) -> bool:
        self._do_what_is_due()
        return queue.is_owed(number)

    def is_held(self, queue: ConsumerQueue, number: int, delivery: int) -> bool:
        """Return whether delivery number `delivery`, and no later one, holds the message."""
        self._do_what_is_due()
        return number in queue.held and queue.subject.stored[number].owed[queue.consumer.name] == delivery

    def nak(self, queue: ConsumerQueue, number: int, delay_seconds: float) -> None:
        num_deliveries = queue.subject.stored[number].owed[queue.consumer.name]
        self._put_back(queue, number, delay_seconds, f"refused after {num_deliveries} deliveries")

    def _put_back(self, queue: ConsumerQueue, number: int, delay_seconds: float, reason: str) -> None:
        """Make the message ready for redelivery, or a dead letter after its last delivery."""
        queue.forget(number)
        num_deliveries, most = queue.subject.stored[number].owed[queue.consumer.name], queue.consumer.max_deliveries
        if most is not None and num_deliveries >= most:
            self.dead_letter(queue, number, reason)
        elif delay_seconds > 0:
            queue.delayed[number] = self._clock.now() + delay_seconds
            self._remember_due(queue.delayed[number], number, queue)
        else:
            queue.make_ready(number)

    def dead_letter(self, queue: ConsumerQueue, number: int, reason: str) -> None:
        """Mark the message as handled, and publish its dead letter if that subject is declared."""
        stored = queue.subject.stored[number]
        letter = dead_letters.DeadLetter(
            subject=queue.subject.name,
            id=stored.id,
            consumer=queue.consumer.name,
            num_deliveries=stored.owed[queue.consumer.name],
            reason=reason,
            data=stored.data,
        )
        queue.subject.settle(queue, number)
        feed = self._subjects.get(dead_letters.dead_letter_subject(queue.subject.name))
        if isinstance(feed, LatestSubject):
            self._publish_to_watchers(feed, dead_letters.encode(letter), letter.letter_id, letter.letter_id, {})

    def _remember_due(self, when: float, number: int, queue: ConsumerQueue) -> None:
        if when < self._next_due():
            wake(self._due_waiters)  # a waiting task would sleep too long
        heapq.heappush(self._due, (when, next(self._order), number, queue))

    def _next_due(self) -> float:
        while self._due:
            when, _, number, queue = self._due[0]
            if when in (queue.held.get(number), queue.delayed.get(number)):
                return when
            heapq.heappop(self._due)
        return math.inf

    def _do_what_is_due(self) -> None:
        now = self._clock.now()
        while self._next_due() <= now:
            _, _, number, queue = heapq.heappop(self._due)
            if number in queue.held:
                reason = f"no acknowledgement within {queue.consumer.ack_wait_seconds:g} s"
                self._put_back(queue, number, 0.0, reason)
            else:
                del queue.delayed[number]
                queue.make_ready(number)

    async def _wait(self, waiters: Waiters, end: float) -> None:
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.add(woken)
        self._due_waiters.add(woken)
        try:
            await first_of(self._clock, [woken], max(min(end, self._next_due()) - self._clock.now(), 0.0))
            self._do_what_is_due()
        finally:
            waiters.discard(woken)
            self._due_waiters.discard(woken)

    def refuse_if_closed(self, subject: str) -> None:
        if self._closed:
            raise TransportClosed(subject)

    def _declared(self, name: str) -> WorkSubject | LatestSubject:
        self.refuse_if_closed(name)
        if name not in self._subjects:
            raise InvalidRequest("subject", name, "was not declared")
        return self._subjects[name]

    def _queue(self, subject: str, name: str) -> ConsumerQueue:
        found = self._declared(subject)
        if not isinstance(found, WorkSubject) or name not in found.queues:
            raise InvalidRequest("consumer", name, f"was not declared for {subject}")
        return found.queues[name]


class _Reading:
    def __init__(self, transport: MemoryTransport, source: ConsumerQueue | SubjectWatcher) -> None:
        self._transport = transport
        self.source = source
        self.closed = False

    async def pull(self, max_messages: int, timeout_seconds: float) -> list[Message]:
        return await self._transport.pull(self, max_messages, timeout_seconds)

    async def close(self) -> None:
        self.closed = True
        if isinstance(self.source, SubjectWatcher) and self.source in self.source.subject.watchers:
            self.source.subject.watchers.remove(self.source)
        wake(self.source.waiters)


class _MemoryReceipt:
    """Receipt whose ack and term, unlike nak, take effect even after the ack deadline."""

    def __init__(self, transport: MemoryTransport, queue: ConsumerQueue, number: int, num_deliveries: int) -> None:
        self._transport = transport
        self._queue = queue
        self._number = number
        self.num_deliveries = num_deliveries
        self._ended = False

    @property
    def token(self) -> str:
        queue = self._queue
        return f"{queue.subject.name} {queue.consumer.name} {self._number} {self.num_deliveries}"

    async def ack(self) -> None:
        if self._ends() and self._transport.is_owed(self._queue, self._number):
            self._queue.subject.settle(self._queue, self._number)

    async def nak(self, delay_seconds: float = 0.0) -> None:
        if self._is_held() and self._ends():
            self._transport.nak(self._queue, self._number, delay_seconds)

    async def in_progress(self) -> None:
        if self._is_held() and not self._ended:
            self._transport.hold(self._queue, self._number)

    async def term(self, reason: str) -> None:
        if self._ends() and self._transport.is_owed(self._queue, self._number):
            self._transport.dead_letter(self._queue, self._number, reason)

    def _ends(self) -> bool:
        before, self._ended = self._ended, True
        return not before

    def _is_held(self) -> bool:
        return self._transport.is_held(self._queue, self._number, self.num_deliveries)


class _MemoryMessage(_MemoryReceipt):
    def __init__(self, transport: MemoryTransport, queue: ConsumerQueue, stored: Stored) -> None:
        super().__init__(transport, queue, stored.number, stored.owed[queue.consumer.name])
        self.subject = queue.subject.name
        self.id = stored.id
        self.data = stored.data
        self.headers = stored.headers


def _unread(watcher: SubjectWatcher, most: int) -> list[Message]:
    keys = list(itertools.islice(watcher.unread, most))
    unread = [watcher.unread.pop(key) for key in keys]
    return [SeenMessage(watcher.subject.name, stored.id, stored.data, stored.headers) for stored in unread]


def _consumers(subject: WorkSubject | LatestSubject) -> dict[str, Consumer]:
    return {name: queue.consumer for name, queue in subject.queues.items()} if isinstance(subject, WorkSubject) else {}
