"""The transport inside one process, with JetStream's semantics; `rlhfspec run` uses it, and so do tests.

How it decides what `base` leaves open:
- Memory is bounded: a subject holds at most `max_pending` messages (of dead letters the newest, for they never wait).
- Ids are remembered for de-duplication while their message is held, and the last `num_remembered_ids` of a subject.
- Deadlines are looked at where somebody calls: each call first does what has fallen due, on all subjects, and a pull
  that waits wakes for the next deadline of anybody.
- It belongs to one event loop.

Example:
    >>> async def main() -> tuple[bool, bool, list[bytes]]:
    ...     transport = MemoryTransport()
    ...     reward = await transport.subscribe("rlhf.sums.sample", Consumer(name="reward"))
    ...     first = await transport.publish("rlhf.sums.sample", b"5", id="sums/3/7/1")
    ...     again = await transport.publish("rlhf.sums.sample", b"5", id="sums/3/7/1")
    ...     return first, again, [message.data for message in await reward.pull(8, timeout_seconds=1.0)]
    >>> asyncio.run(main())
    (True, False, [b'5'])
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from rlhfspec.errors import InvalidRequest, TransportClosed, TransportFull
from rlhfspec.transport import dead_letters
from rlhfspec.transport.base import Consumer, Message, Subscription
from rlhfspec.transport.clock import Clock, SystemClock, first_of

Waiters = set[asyncio.Future[None]]


@dataclass(slots=True)
class _Stored:
    number: int  # of publication: the order of delivery
    id: str
    data: bytes
    owed: dict[str, int]  # the names that have yet to acknowledge it: how often it was delivered to each


class _Queue:
    """One consumer name on one subject. A message it is owed is in exactly one of ready, held and delayed."""

    def __init__(self, subject: _Subject, name: str) -> None:
        self.subject = subject
        self.consumer = Consumer(name=name)  # until somebody subscribes under the name, and says more
        self.subscribed = False
        self.ready: list[int] = []  # heap of message numbers; acknowledged ones are skipped when they surface
        self.held: dict[int, float] = {}  # number -> when it must be acknowledged
        self.delayed: dict[int, float] = {}  # number -> when it may be delivered again
        self.waiters: Waiters = set()

    def is_owed(self, number: int) -> bool:
        stored = self.subject.stored.get(number)
        return stored is not None and self.consumer.name in stored.owed

    def make_ready(self, number: int) -> None:
        heapq.heappush(self.ready, number)
        _wake(self.waiters)

    def next_ready(self) -> _Stored | None:
        while self.ready:
            number = heapq.heappop(self.ready)
            if self.is_owed(number):
                return self.subject.stored[number]
        return None

    def forget(self, number: int) -> None:
        """Done with, or dropped. Where it was held, there is room for another."""
        self.delayed.pop(number, None)
        if self.held.pop(number, None) is not None:
            _wake(self.waiters)


class _Subject:
    def __init__(self, name: str) -> None:
        self.name = name
        self.declared = False
        self.num_published = 0
        self.stored: dict[int, _Stored] = {}  # oldest first
        self.queues: dict[str, _Queue] = {}
        self.ids: dict[str, None] = {}  # remembered, oldest first
        self.waiters: Waiters = set()  # for room

    def queue(self, name: str) -> _Queue:
        """A new name is owed everything that is still held."""
        if name not in self.queues:
            queue = self.queues[name] = _Queue(self, name)
            for stored in self.stored.values():
                stored.owed[name] = 0
                queue.make_ready(stored.number)
        return self.queues[name]

    def put(self, data: bytes, id: str) -> None:
        self.ids[id] = None
        if self.declared and not self.queues:
            return  # nobody will ever read it
        self.num_published += 1
        self.stored[self.num_published] = _Stored(self.num_published, id, data, dict.fromkeys(self.queues, 0))
        for queue in self.queues.values():
            queue.make_ready(self.num_published)

    def settle(self, queue: _Queue, number: int) -> None:
        """This name is done with the message; when all are, it goes."""
        queue.forget(number)
        stored = self.stored[number]
        del stored.owed[queue.consumer.name]
        if not stored.owed:
            del self.stored[number]
            _wake(self.waiters)

    def drop_oldest(self) -> None:
        number = next(iter(self.stored))
        del self.stored[number]
        for queue in self.queues.values():
            queue.forget(number)

    def forget_ids(self, num_kept: int) -> None:
        """An id whose message is still held stays, whatever its age."""
        if len(self.ids) > 2 * max(num_kept, len(self.stored)):
            held = {stored.id for stored in self.stored.values()}
            newest = set(list(self.ids)[-num_kept:])
            self.ids = {id: None for id in self.ids if id in newest or id in held}


class MemoryTransport:
    """`publish_timeout_seconds`: so long `publish` waits for room before it raises `TransportFull`."""

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
        self._subjects: dict[str, _Subject] = {}
        self._due: list[tuple[float, int, int, _Queue]] = []  # heap; what holds no more is skipped as it surfaces
        self._order = itertools.count()
        self._due_waiters: Waiters = set()
        self._closed = False

    async def declare(self, subject: str, names: Iterable[str]) -> None:
        state = self._subject(subject)
        state.declared = True
        for name in names:
            state.queue(name)

    async def publish(self, subject: str, data: bytes, *, id: str) -> bool:
        state = self._subject(subject)
        end = self._clock.now() + self._publish_timeout_seconds
        while True:
            self._do_what_is_due()
            if id in state.ids:
                return False
            if len(state.stored) < self._max_pending:
                state.put(data, id)
                state.forget_ids(self._num_remembered_ids)
                return True
            if self._clock.now() >= end:
                raise TransportFull(subject, len(state.stored), _behind(state), self._publish_timeout_seconds)
            await self._wait(state.waiters, end)
            self._refuse_if_closed(subject)

    async def subscribe(self, subject: str, consumer: Consumer) -> Subscription:
        queue = self._subject(subject).queue(consumer.name)
        if queue.subscribed and queue.consumer != consumer:
            raise InvalidRequest("consumer", consumer, f"{subject} is read under this name with {queue.consumer}")
        queue.consumer = consumer
        queue.subscribed = True
        return _MemorySubscription(self, queue)

    async def close(self) -> None:
        self._closed = True
        for subject in self._subjects.values():
            _wake(subject.waiters)
            for queue in subject.queues.values():
                _wake(queue.waiters)

    async def _pull(
        self, subscription: _MemorySubscription, max_messages: int, timeout_seconds: float
    ) -> list[Message]:
        queue = subscription.queue
        end = self._clock.now() + timeout_seconds
        while True:
            self._refuse_if_closed(queue.subject.name)
            if subscription.closed:
                raise TransportClosed(queue.subject.name)
            self._do_what_is_due()
            taken = self._take(queue, max_messages)
            if taken or self._clock.now() >= end:
                return taken
            await self._wait(queue.waiters, end)

    def _take(self, queue: _Queue, max_messages: int) -> list[Message]:
        room = min(max_messages, queue.consumer.max_unacknowledged - len(queue.held))
        taken: list[Message] = []
        while len(taken) < room and (stored := queue.next_ready()) is not None:
            stored.owed[queue.consumer.name] += 1
            self._hold(queue, stored.number)
            taken.append(_MemoryMessage(self, queue, stored))
        return taken

    def _hold(self, queue: _Queue, number: int) -> None:
        queue.held[number] = self._clock.now() + queue.consumer.ack_wait_seconds
        self._remember_due(queue.held[number], number, queue)

    def _put_back(self, queue: _Queue, number: int, delay_seconds: float, reason: str) -> None:
        """Not acknowledged: delivered again, unless it was often enough."""
        queue.forget(number)
        stored = queue.subject.stored[number]
        if stored.owed[queue.consumer.name] >= queue.consumer.max_deliveries:
            self._bury(queue, stored, reason)
        elif delay_seconds > 0:
            queue.delayed[number] = self._clock.now() + delay_seconds
            self._remember_due(queue.delayed[number], number, queue)
        else:
            queue.make_ready(number)

    def _bury(self, queue: _Queue, stored: _Stored, reason: str) -> None:
        """To the dead letters, and done with."""
        letter = dead_letters.DeadLetter(
            subject=queue.subject.name,
            id=stored.id,
            consumer=queue.consumer.name,
            num_deliveries=stored.owed[queue.consumer.name],
            reason=reason,
            data=stored.data,
        )
        queue.subject.settle(queue, stored.number)
        grave = self._subject(dead_letters.dead_letter_subject(queue.subject.name))
        if letter.letter_id not in grave.ids:
            grave.put(dead_letters.encode(letter), letter.letter_id)
            if len(grave.stored) > self._max_pending:
                grave.drop_oldest()
            grave.forget_ids(self._num_remembered_ids)

    def _remember_due(self, when: float, number: int, queue: _Queue) -> None:
        if when < self._next_due():
            _wake(self._due_waiters)  # who waits now sleeps too long
        heapq.heappush(self._due, (when, next(self._order), number, queue))

    def _next_due(self) -> float:
        while self._due and not _is_due_at(*self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else math.inf

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
        """Until woken, until the next deadline of anybody, or until the end."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters.add(woken)
        self._due_waiters.add(woken)
        try:
            await first_of(self._clock, [woken], max(min(end, self._next_due()) - self._clock.now(), 0.0))
        finally:
            waiters.discard(woken)
            self._due_waiters.discard(woken)

    def _subject(self, name: str) -> _Subject:
        self._refuse_if_closed(name)
        return self._subjects.setdefault(name, _Subject(name))

    def _refuse_if_closed(self, subject: str) -> None:
        if self._closed:
            raise TransportClosed(subject)


class _MemorySubscription:
    def __init__(self, transport: MemoryTransport, queue: _Queue) -> None:
        self._transport = transport
        self.queue = queue
        self.closed = False

    async def pull(self, max_messages: int, timeout_seconds: float) -> list[Message]:
        return await self._transport._pull(self, max_messages, timeout_seconds)

    async def close(self) -> None:
        self.closed = True
        _wake(self.queue.waiters)


class _MemoryMessage:
    """One delivery. Ack and term count even when they come too late, for then the work is done all the same."""

    def __init__(self, transport: MemoryTransport, queue: _Queue, stored: _Stored) -> None:
        self._transport = transport
        self._queue = queue
        self._stored = stored
        self.num_deliveries = stored.owed[queue.consumer.name]
        self._ended = False

    @property
    def subject(self) -> str:
        return self._queue.subject.name

    @property
    def id(self) -> str:
        return self._stored.id

    @property
    def data(self) -> bytes:
        return self._stored.data

    async def ack(self) -> None:
        if self._ends() and self._is_owed():
            self._queue.subject.settle(self._queue, self._stored.number)

    async def nak(self, delay_seconds: float = 0.0) -> None:
        if self._is_held() and self._ends():
            reason = f"refused after {self.num_deliveries} deliveries"
            self._transport._put_back(self._queue, self._stored.number, delay_seconds, reason)

    async def in_progress(self) -> None:
        if self._is_held():
            self._transport._hold(self._queue, self._stored.number)

    async def term(self, reason: str) -> None:
        if self._ends() and self._is_owed():
            self._transport._bury(self._queue, self._stored, reason)

    def _ends(self) -> bool:
        """Says whether this is what ends the delivery."""
        before, self._ended = self._ended, True
        return not before

    def _is_owed(self) -> bool:
        self._transport._do_what_is_due()
        return self._queue.is_owed(self._stored.number)

    def _is_held(self) -> bool:
        """Whether this very delivery is the one that holds the message, no later one."""
        self._transport._do_what_is_due()
        number = self._stored.number
        return number in self._queue.held and self._stored.owed[self._queue.consumer.name] == self.num_deliveries


def _is_due_at(when: float, _order: int, number: int, queue: _Queue) -> bool:
    return when in (queue.held.get(number), queue.delayed.get(number))


def _behind(subject: _Subject) -> list[str]:
    """The consumers that have yet to acknowledge the oldest message."""
    return list(next(iter(subject.stored.values())).owed)


def _wake(waiters: Waiters) -> None:
    for woken in waiters:
        if not woken.done():
            woken.set_result(None)
