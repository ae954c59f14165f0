"""Records instead of bytes, by THE MAP: a stage publishes and reads what `rlhfspec.loop` gives it, and nothing else.

Example:
    >>> from rlhfspec.records import Demand
    >>> from rlhfspec.transport.memory import MemoryTransport
    >>> async def main() -> int:
    ...     bus = await Bus.open(MemoryTransport(), "sums", workers={"trainer": 1, "prompts": 1})
    ...     inbox = await bus.of("prompts").subscribe(Demand)
    ...     await bus.of("trainer").publish(Demand(id="sums/3/demand/1", job="sums", step=3, round=1, num_prompts=4))
    ...     [delivery] = await inbox.pull(max_records=8, timeout_seconds=1.0)
    ...     await delivery.ack()
    ...     return delivery.record.num_prompts
    >>> asyncio.run(main())
    4
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar, get_args

from rlhfspec import loop
from rlhfspec.errors import InvalidRequest, MalformedRecord
from rlhfspec.records import Demand, Load, Prompt, Record, Sample, Score, StepReport, Weights
from rlhfspec.transport.base import Consumer, Message, Subscription, Transport
from rlhfspec.transport.clock import Clock, SystemClock
from rlhfspec.wire.codec import decode, encode

R = TypeVar("R", Prompt, Sample, Score, Weights, Demand, Load, StepReport)
DEAD_LETTER_CONSUMER = "supervisor"


class Delivery(Generic[R]):
    """A record to handle. Exactly one of ack, nak and term ends it (`transport.base.Message`)."""

    def __init__(self, record: R, message: Message) -> None:
        self.record: R = record
        self._message = message

    @property
    def num_deliveries(self) -> int:
        return self._message.num_deliveries

    async def ack(self) -> None:
        await self._message.ack()

    async def nak(self, delay_seconds: float = 0.0) -> None:
        await self._message.nak(delay_seconds)

    async def in_progress(self) -> None:
        await self._message.in_progress()

    async def term(self, reason: str) -> None:
        await self._message.term(reason)


class Inbox(Generic[R]):
    """Records of one type for one worker. What cannot be decoded goes to the dead letters and is never seen."""

    def __init__(self, record_type: type[R], subscription: Subscription, clock: Clock) -> None:
        self._record_type: type[R] = record_type
        self._subscription = subscription
        self._clock = clock

    async def pull(self, *, max_records: int, timeout_seconds: float) -> list[Delivery[R]]:
        """At least one as soon as there is one, at most `max_records`; an empty list at the timeout."""
        end = self._clock.now() + timeout_seconds
        while True:
            left = max(end - self._clock.now(), 0.0)
            messages = await self._subscription.pull(max_records, left)
            deliveries = [delivery for message in messages if (delivery := await self._decoded(message))]
            if deliveries or not messages:
                return deliveries

    async def close(self) -> None:
        await self._subscription.close()

    async def _decoded(self, message: Message) -> Delivery[R] | None:
        try:
            record = decode(message.data)
        except MalformedRecord as error:
            await message.term(str(error))
            return None
        if not isinstance(record, self._record_type):
            await message.term(f"a {type(record).__name__} among records of {self._record_type.__name__}")
            return None
        return Delivery(record, message)


class StageBus:
    """The bus as one worker of a stage (or an observer) may use it."""

    def __init__(self, bus: Bus, stage: loop.Stage, worker: int) -> None:
        self._bus = bus
        self.stage = stage
        self.worker = worker
        self.clock = bus.clock

    async def publish(self, record: Record) -> bool:
        """False: this id was published before, and nothing changed. Waits for room (`TransportFull` after long)."""
        if type(record) not in self.stage.produces:
            raise InvalidRequest("record", type(record).__name__, f"{self.stage.name} does not produce it (loop.py)")
        return await self._bus.transport.publish(
            loop.subject(self._bus.job, type(record)), encode(record), id=record.id
        )

    async def subscribe(
        self,
        record_type: type[R],
        *,
        ack_wait_seconds: float = 60.0,
        max_deliveries: int = 5,
        max_unacknowledged: int = 1024,
    ) -> Inbox[R]:
        """Workers of one stage compete for records, but each gets every `loop.TO_EVERY_WORKER`."""
        if record_type not in self.stage.consumes:
            raise InvalidRequest("record", record_type.__name__, f"{self.stage.name} does not consume it (loop.py)")
        consumer = Consumer(
            name=loop.consumer_name(record_type, self.stage.name, self.worker),
            ack_wait_seconds=ack_wait_seconds,
            max_deliveries=max_deliveries,
            max_unacknowledged=max_unacknowledged,
        )
        subscription = await self._bus.transport.subscribe(loop.subject(self._bus.job, record_type), consumer)
        return Inbox(record_type, subscription, self._bus.clock)


class Bus:
    """One job's records over one transport."""

    def __init__(self, transport: Transport, job: str, workers: Mapping[str, int], clock: Clock) -> None:
        self.transport = transport
        self.job = job
        self.workers = dict(workers)
        self.clock = clock

    @classmethod
    async def open(
        cls, transport: Transport, job: str, *, workers: Mapping[str, int], clock: Clock | None = None
    ) -> Bus:
        """`workers`: every stage and observer that runs in this job, and how many of each.

        Only they are waited for: a job without a critic has no consumer `critic`, and a record is forgotten when
        everybody in here who reads it has acknowledged it.
        """
        for name in workers:
            _known(name)
        bus = cls(transport, job, workers, clock or SystemClock())
        for record_type in get_args(Record):
            await transport.declare(loop.subject(job, record_type), bus.consumer_names(record_type))
        await transport.declare(loop.dead_letters(job), [DEAD_LETTER_CONSUMER])
        return bus

    def consumer_names(self, record_type: type[Record]) -> list[str]:
        """Everybody in this job who reads these records."""
        names = [
            loop.consumer_name(record_type, name, worker)
            for name, num_workers in self.workers.items()
            if record_type in loop.BY_NAME[name].consumes
            for worker in range(num_workers)
        ]
        return list(dict.fromkeys(names))

    def of(self, name: str, worker: int = 0) -> StageBus:
        """The bus as this worker of this stage or observer may use it."""
        num_workers = self.workers.get(name, 0)
        if not 0 <= worker < num_workers:
            raise InvalidRequest("stage", f"{name} {worker}", f"this job runs {num_workers} workers of it")
        return StageBus(self, _known(name), worker)

    async def dead_letters(self) -> Subscription:
        """What nobody could handle; the data is a `transport.dead_letters.DeadLetter`."""
        return await self.transport.subscribe(loop.dead_letters(self.job), Consumer(name=DEAD_LETTER_CONSUMER))


def _known(name: str) -> loop.Stage:
    if name not in loop.BY_NAME:
        raise InvalidRequest("stage", name, f"must be one of {', '.join(loop.BY_NAME)}")
    return loop.BY_NAME[name]


@asynccontextmanager
async def kept_in_progress(
    held: Callable[[], Iterable[Delivery[Any]]], *, every_seconds: float, clock: Clock
) -> AsyncIterator[None]:
    """While the block runs, nothing of what is held at the time is delivered to anybody else, however long it takes."""

    async def keep() -> None:
        while True:
            await clock.sleep(every_seconds)
            for delivery in list(held()):
                await delivery.in_progress()

    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
