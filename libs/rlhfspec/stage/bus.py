"""Typed records over a transport, restricted for each stage by `messages.loop`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Generic, Self, TypeVar

from rlhfspec.errors import InvalidRequest, MalformedRecord
from rlhfspec.messages import loop
from rlhfspec.messages.records import Record
from rlhfspec.messages.transport.base import Message, Receipt, Subscription, Transport
from rlhfspec.messages.transport.clock import Clock, SystemClock
from rlhfspec.messages.wire.codec import decode, encode
from rlhfspec.stage.logs import about
from rlhfspec.telemetry.base import Delivered, How, SampleProgress, Watcher, WorkerPlace

log = logging.getLogger("rlhfspec.stage")
_R = TypeVar("_R", bound=Record)
_CONCURRENT_ACKS = 512  # concurrent acknowledgements
Tell = Callable[[How, SampleProgress | None], None]


class Held:
    """Receipt of a delivery, whose ack deadline the inbox extends until ack, nak, term or leave."""

    def __init__(self, receipt: Receipt, id: str, kept: dict[str, Receipt], tell: Tell | None = None) -> None:
        self._receipt = receipt
        self._id = id
        self._kept = kept
        self._tell = tell
        kept[id] = receipt  # the latest delivery of a redelivered message

    @property
    def token(self) -> str:
        return self._receipt.token

    async def ack(self) -> None:
        self._forget()
        await self._receipt.ack()
        self._ended("ack")

    async def nak(self, delay_seconds: float = 0.0) -> None:
        self._forget()
        await self._receipt.nak(delay_seconds)
        self._ended("nak")

    async def term(self, reason: str) -> None:
        self._forget()
        await self._receipt.term(reason)
        self._ended("term")

    def leave(self, progress: SampleProgress | None) -> None:
        """Forget a delivery that moved to another worker; `progress` is None if it never began here."""
        self._forget()
        self._ended("moved", progress)

    def _forget(self) -> None:
        if self._kept.get(self._id) is self._receipt:
            del self._kept[self._id]

    def watched(self, tell: Tell | None) -> None:
        self._tell = tell

    def _ended(self, how: How, progress: SampleProgress | None = None) -> None:
        if self._tell is not None:
            self._tell(how, progress)


class Delivery(Generic[_R]):
    """Received record, to be ended by one ack, nak or term; its receipt `held` may outlive it."""

    def __init__(self, record: _R, held: Held, num_deliveries: int, headers: Mapping[str, str]) -> None:
        self.record: _R = record
        self.held = held
        self.num_deliveries = num_deliveries
        self.headers = headers

    async def ack(self) -> None:
        await self.held.ack()

    async def nak(self, delay_seconds: float = 0.0) -> None:
        await self.held.nak(delay_seconds)

    async def term(self, reason: str) -> None:
        await self.held.term(reason)


class Inbox(Generic[_R]):
    """Inbox of one record type. Inside `async with`, it extends the ack deadlines of pulled records."""

    def __init__(
        self,
        bus: Bus,
        record_type: type[_R],
        subscription: Subscription,
        place: WorkerPlace,
        watcher: Watcher | None = None,
    ) -> None:
        self._bus = bus
        self._record_type: type[_R] = record_type
        self._subscription = subscription
        self._clock = bus.clock
        self._place = place
        self._watcher = watcher
        self._kept: dict[str, Receipt] = {}  # in progress, by message
        self._keeping: asyncio.Task[None] | None = None

    async def pull(self, *, max_records: int, timeout_seconds: float) -> list[Delivery[_R]]:
        """Return up to `max_records` as soon as there is one, or [] at the timeout."""
        end = self._clock.now() + timeout_seconds
        while True:
            left = max(end - self._clock.now(), 0.0)
            messages = await self._subscription.pull(max_records, left)
            deliveries = [delivery for message in messages if (delivery := await self._decoded(message))]
            if deliveries or not messages:
                return deliveries

    async def __aenter__(self) -> Self:
        self._keeping = asyncio.create_task(self._keep_in_progress())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
        await self._subscription.close()

    async def _keep_in_progress(self) -> None:
        while True:
            await self._clock.sleep(loop.ACK_WAIT_SECONDS / 4)
            for receipt in list(self._kept.values()):
                await receipt.in_progress()

    async def _decoded(self, message: Message) -> Delivery[_R] | None:
        try:
            record = self._bus.read(self._record_type, message.id, message.data)
        except MalformedRecord as error:
            log.warning("%s of %s is refused: %s", message.id, message.subject, error)
            if self._watcher is not None:
                self._watcher.ended(self._place, self._record_type, message.id, "term")
            await message.term(str(error))
            return None
        kept = self._kept if message.token else {}
        tell = self._watched(record, Delivered(message.headers, message.num_deliveries), bool(message.token))
        held = Held(message, message.id, kept, tell)
        return Delivery(record, held, message.num_deliveries, message.headers)

    async def adopt(self, data: bytes, id: str, token: str, headers: Mapping[str, str]) -> Delivery[_R]:
        """Take over another worker's delivery by its receipt's token; raise InvalidRequest for a bad token."""
        record = self._bus.read(self._record_type, f"{self._bus.uid}/{id}", data)
        subject = self._bus.subject(self._record_type)
        receipt = await self._bus.transport.adopt(token, subject, self._place.stage)
        await receipt.in_progress()
        held = Held(receipt, f"{self._bus.uid}/{record.id}", self._kept)
        return Delivery(record, held, receipt.num_deliveries, headers)

    def arrived(self, delivery: Delivery[_R], progress: SampleProgress) -> None:
        delivered = Delivered(delivery.headers, delivery.num_deliveries, progress)
        delivery.held.watched(self._watched(delivery.record, delivered, True))

    def _watched(self, record: _R, delivered: Delivered, can_end: bool) -> Tell | None:
        if self._watcher is None:
            return None
        self._watcher.taken(self._place, record, delivered)
        return partial(self._watcher.ended, self._place, self._record_type, record.id) if can_end else None


async def ack_all(held: Iterable[Held]) -> None:
    """Acknowledge many deliveries concurrently."""
    waiting = list(held)
    for start in range(0, len(waiting), _CONCURRENT_ACKS):
        await asyncio.gather(*(one.ack() for one in waiting[start : start + _CONCURRENT_ACKS]))


async def give_back(held: Iterable[Held]) -> None:
    """Nak all deliveries, for redelivery to other workers at once."""
    await asyncio.gather(*(one.nak() for one in held))


class StageBus:
    def __init__(self, bus: Bus, stage: loop.Stage, worker: int) -> None:
        self._bus = bus
        self.stage = stage
        self.worker = worker
        self.clock = bus.clock
        self._place = WorkerPlace(stage.name, worker)

    async def publish(self, record: Record) -> bool:
        """Publish a record and return whether its id is new; raise TransportFull if consumers lag too long."""
        if type(record) not in self.stage.produces:
            raise InvalidRequest("record", type(record).__name__, f"{self.stage.name} does not produce it (loop.py)")
        watcher = self._bus.watcher
        with about(record.id):
            if watcher is None:
                return await self._bus.publish(record)
            began = time.time()
            is_new = await self._bus.publish(record, watcher.publishing(self._place, record))
            watcher.published(self._place, record, began, is_new)
            return is_new

    async def subscribe(self, record_type: type[_R]) -> Inbox[_R]:
        """Subscribe to a record type. Workers of a stage share work, but each receives all state and signals."""
        if record_type not in (*self.stage.consumes, *self.stage.watches, *loop.SEEN_BY_ALL):
            raise InvalidRequest("record", record_type.__name__, f"{self.stage.name} does not consume it (loop.py)")
        transport, subject = self._bus.transport, self._bus.subject(record_type)
        looks_on = self.stage in loop.OBSERVERS or record_type in self.stage.watches
        if loop.KINDS[record_type] != "work" or looks_on:
            watcher = None if looks_on else self._bus.watcher
            return Inbox(self._bus, record_type, await transport.watch(subject), self._place, watcher)
        subscription = await transport.subscribe(subject, loop.work_consumer(self.stage))
        return Inbox(self._bus, record_type, subscription, self._place, self._bus.watcher)


class Bus:
    """Records of one run over a transport. Work is stored only for the stages in `workers`."""

    def __init__(
        self, transport: Transport, job: str, *, uid: str, workers: Mapping[str, int], clock: Clock | None = None
    ) -> None:
        for name in workers:
            _known(name)
        self.transport = transport
        self.job = job
        self.uid = uid
        self.workers = dict(workers)
        self.clock = clock or SystemClock()
        self.watcher: Watcher | None = None  # set before the first subscription

    @classmethod
    async def open(
        cls, transport: Transport, job: str, *, workers: Mapping[str, int], uid: str = "run", clock: Clock | None = None
    ) -> Bus:
        bus = cls(transport, job, uid=uid, workers=workers, clock=clock)
        await bus.declare()
        return bus

    async def declare(self) -> None:
        """Declare every subject of the run, before its first use."""
        for declaration in loop.declarations(self.job, self.uid, self.workers):
            await self.transport.declare(*declaration)

    @property
    def last_declared(self) -> str:
        return self.subject(loop.LAST_DECLARED)

    def subject(self, record_type: type) -> str:
        return loop.subject(self.job, self.uid, record_type)

    def read(self, record_type: type[_R], message_id: str, data: bytes) -> _R:
        record = decode(data)
        if not isinstance(record, record_type):
            raise MalformedRecord(f"a {type(record).__name__} among records of {record_type.__name__}")
        if record.job != self.job:
            raise MalformedRecord(f"{record.id} is of job {record.job!r}, not of {self.job!r}")
        if message_id != f"{self.uid}/{record.id}":
            raise MalformedRecord(f"{record.id} came under the message id {message_id!r}")
        return record

    def of(self, name: str, worker: int = 0) -> StageBus:
        num_workers = self.workers.get(name, 0)
        if not 0 <= worker < num_workers:
            raise InvalidRequest("stage", f"{name} {worker}", f"this job runs {num_workers} workers of this stage")
        return StageBus(self, _known(name), worker)

    async def publish(self, record: Record, headers: Mapping[str, str] | None = None) -> bool:
        """Publish a record outside any stage, such as a heartbeat."""
        return await self.transport.publish(
            self.subject(type(record)),
            encode(record),
            id=f"{self.uid}/{record.id}",
            key=loop.state_key(record),
            headers=headers,
        )

    async def release(self, name: str) -> None:
        """Make the unacknowledged records of a stage's only worker deliverable again, before it restarts."""
        for record_type in _known(name).consumes:
            if loop.KINDS[record_type] == "work":
                await self.transport.release(self.subject(record_type), name)

    async def dead_letters(self) -> Subscription:
        return await self.transport.watch(loop.dead_letters(self.job, self.uid))


def _known(name: str) -> loop.Stage:
    if name not in loop.BY_NAME:
        raise InvalidRequest("stage", name, f"must be one of {', '.join(loop.BY_NAME)}")
    return loop.BY_NAME[name]
