"""The memory transport keeps `TransportContract`, which asks nothing that NATS could not keep."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rlhfspec.messages.transport import dead_letters
from rlhfspec.messages.transport.base import Consumer
from rlhfspec.messages.transport.clock import FakeClock, SystemClock, first_of
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.messages.transport.memory_subjects import WorkSubject
from rlhfspec.testing.transport import TransportContract
from rlhfspec.testing.transport_harness import DEAD, SUBJECT, TransportHarness, ids


class TestMemoryTransport(TransportContract):
    @asynccontextmanager
    async def open(self, *, max_pending: int, publish_timeout_seconds: float) -> AsyncIterator[TransportHarness]:
        clock = FakeClock()
        options = {"max_pending": max_pending, "publish_timeout_seconds": publish_timeout_seconds}
        yield TransportHarness(MemoryTransport(clock=clock, **options), clock)


async def test_memory_is_bounded() -> None:
    transport = MemoryTransport(clock=FakeClock(), num_remembered_ids=10)
    await transport.declare(SUBJECT, "work", [Consumer(name="reward")])
    reward = await transport.subscribe(SUBJECT, Consumer(name="reward"))
    for number in range(500):
        await transport.publish(SUBJECT, b"", id=str(number))
        for message in await reward.pull(1, 1.0):
            await message.ack()
    subject = transport._subjects[SUBJECT]
    assert isinstance(subject, WorkSubject)
    assert not subject.stored
    assert len(subject.ids) <= 20
    assert not await transport.publish(SUBJECT, b"", id="499")
    assert len(transport._due) <= 1 or transport._next_due() == float("inf")


async def test_an_id_is_remembered_while_its_message_is_held() -> None:
    transport = MemoryTransport(clock=FakeClock(), num_remembered_ids=2)
    await transport.declare(SUBJECT, "work", [Consumer(name="reward")])
    reward = await transport.subscribe(SUBJECT, Consumer(name="reward"))
    for number in range(50):
        await transport.publish(SUBJECT, b"", id=str(number))
        for message in await reward.pull(1, 0.0):
            if number > 0:
                await message.ack()
    assert not await transport.publish(SUBJECT, b"", id="0")
    assert await transport.publish(SUBJECT, b"", id="1")


async def test_dead_letters_keep_the_newest() -> None:
    transport = MemoryTransport(clock=FakeClock(), max_pending=3)
    await transport.declare(SUBJECT, "work", [Consumer(name="reward")])
    await transport.declare(DEAD, "state")
    reward = await transport.subscribe(SUBJECT, Consumer(name="reward"))
    for number in range(5):
        await transport.publish(SUBJECT, b"", id=str(number))
        await (await reward.pull(1, 1.0))[0].term("no")
    watch = await transport.watch(DEAD)
    assert [dead_letters.decode(m.data).id for m in await watch.pull(9, 1.0)] == ["2", "3", "4"]


async def test_waiting_costs_no_turns_of_the_event_loop() -> None:
    transport = MemoryTransport()  # the system's clock
    consumer = Consumer(name="reward", ack_wait_seconds=0.05)
    await transport.declare(SUBJECT, "work", [consumer])
    reward = await transport.subscribe(SUBJECT, consumer)
    await transport.publish(SUBJECT, b"", id="a")
    await reward.pull(1, 1.0)
    loop = asyncio.get_running_loop()
    turns = 0
    inner = loop._run_once  # type: ignore[attr-defined]

    def counted() -> None:
        nonlocal turns
        turns += 1
        inner()

    loop._run_once = counted  # type: ignore[attr-defined]
    assert ids(await reward.pull(1, 10.0)) == ["a"], "redelivered by the clock alone"
    assert turns < 30


def test_fake_time_wakes_sleepers_in_order() -> None:
    async def main() -> list[tuple[str, float]]:
        clock = FakeClock()
        woken: list[tuple[str, float]] = []

        async def nap(name: str, *seconds: float) -> None:
            for each in seconds:
                await clock.sleep(each)
                woken.append((name, clock.now()))

        naps = [asyncio.create_task(nap("a", 3.0)), asyncio.create_task(nap("b", 1.0, 1.0))]
        await clock.advance(10.0)
        await asyncio.gather(*naps)
        return woken

    assert asyncio.run(main()) == [("b", 1.0), ("b", 2.0), ("a", 3.0)]


async def test_first_of_says_whether_any_is_done() -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert not await first_of(SystemClock(), [never], 0.0)
    never.set_result(None)
    assert await first_of(SystemClock(), [never], 1000.0)
