"""The memory transport keeps its contract and equals a slow model; NATS pulls over a scripted connection."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rlhfspec.messages.transport import dead_letters
from rlhfspec.messages.transport.base import Consumer, Message, Subscription
from rlhfspec.messages.transport.clock import FakeClock, SystemClock, first_of
from rlhfspec.messages.transport.dead_letters import DeadLetter
from rlhfspec.messages.transport.jetstream import reading as module
from rlhfspec.messages.transport.jetstream.deliveries import Consuming
from rlhfspec.messages.transport.jetstream.reading import PullReading
from rlhfspec.messages.transport.memory import MemoryTransport
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


async def test_fake_time_wakes_sleepers_in_order() -> None:
    clock = FakeClock()
    woken: list[tuple[str, float]] = []

    async def nap(name: str, *seconds: float) -> None:
        for each in seconds:
            await clock.sleep(each)
            woken.append((name, clock.now()))

    naps = [asyncio.create_task(nap("a", 3.0)), asyncio.create_task(nap("b", 1.0, 1.0))]
    await clock.advance(10.0)
    await asyncio.gather(*naps)
    assert woken == [("b", 1.0), ("b", 2.0), ("a", 3.0)]


async def test_first_of_returns_whether_a_future_is_done() -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert not await first_of(SystemClock(), [never], 0.0)
    never.set_result(None)
    assert await first_of(SystemClock(), [never], 1000.0)


ACK_WAIT, MAX_DELIVERIES, MAX_HELD = 5.0, 3, 4
NAMES = ("reward", "critic")


@dataclass
class Model:
    now: float = 0.0
    published: list[str] = field(default_factory=list)
    # (name, id) -> ("ready", 0.0) | ("held", deadline) | ("delayed", when) | ("done", 0.0) | ("dead", 0.0)
    state: dict[tuple[str, str], tuple[str, float]] = field(default_factory=dict)
    num_deliveries: dict[tuple[str, str], int] = field(default_factory=dict)

    def publish(self, id: str) -> bool:
        if id in self.published:
            return False
        self.published.append(id)
        for name in NAMES:
            self.state[name, id] = ("ready", 0.0)
            self.num_deliveries[name, id] = 0
        return True

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for key, (kind, when) in self.state.items():
            if kind == "delayed" and when <= self.now:
                self.state[key] = ("ready", 0.0)
            if kind == "held" and when <= self.now:
                self.put_back(key, 0.0)

    def put_back(self, key: tuple[str, str], delay: float) -> None:
        if self.num_deliveries[key] >= MAX_DELIVERIES:
            self.state[key] = ("dead", 0.0)
        else:
            self.state[key] = ("delayed", self.now + delay) if delay else ("ready", 0.0)

    def pull(self, name: str, most: int) -> list[tuple[str, int]]:
        num_held = sum(kind == "held" for (owner, _), (kind, _) in self.state.items() if owner == name)
        room = max(min(most, MAX_HELD - num_held), 0)
        ready = [id for id in self.published if self.state[name, id][0] == "ready"][:room]
        for id in ready:
            self.state[name, id] = ("held", self.now + ACK_WAIT)
            self.num_deliveries[name, id] += 1
        return [(id, self.num_deliveries[name, id]) for id in ready]

    def end(self, how: str, name: str, id: str, delivery: int) -> None:
        """End a delivery: ack and term count while the message is owed, nak and in_progress only from its holder."""
        key = (name, id)
        holds = self.state[key][0] == "held" and self.num_deliveries[key] == delivery
        if how in ("ack", "term") and self.state[key][0] not in ("done", "dead"):
            self.state[key] = ("done" if how == "ack" else "dead", 0.0)
        elif how == "nak" and holds:
            self.put_back(key, 2.0 if delivery % 2 else 0.0)
        elif how == "in_progress" and holds:
            self.state[key] = ("held", self.now + ACK_WAIT)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.integers(0, 5)),
        st.tuples(st.just("pull"), st.sampled_from(NAMES), st.integers(1, 3)),
        st.tuples(st.sampled_from(["ack", "nak", "term", "in_progress"]), st.integers(1, 4)),
        st.tuples(st.just("pass"), st.sampled_from([1.0, 2.0, 5.0])),
    ),
    min_size=30,
    max_size=60,
)


@settings(max_examples=100)
@given(actions)
def test_no_interleaving_loses_or_doubles_a_message(steps: list[tuple[Any, ...]]) -> None:
    asyncio.run(follow(steps))


async def follow(steps: list[tuple[Any, ...]]) -> None:
    clock, model = FakeClock(), Model()
    clock.SETTLING_ROUNDS = 2  # type: ignore[misc]
    transport = MemoryTransport(clock=clock)
    limits = {"ack_wait_seconds": ACK_WAIT, "max_deliveries": MAX_DELIVERIES, "max_unacknowledged": MAX_HELD}
    consumers = [Consumer(name=name, **limits) for name in NAMES]
    await transport.declare(SUBJECT, "work", consumers)
    await transport.declare(DEAD, "state")
    inboxes = {consumer.name: await transport.subscribe(SUBJECT, consumer) for consumer in consumers}
    deliveries: list[tuple[str, Message]] = []
    ended: set[int] = set()
    for step in steps:
        match step:
            case ("publish", number):
                assert await transport.publish(SUBJECT, b"", id=str(number)) == model.publish(str(number))
            case ("pull", name, most):
                messages = await inboxes[name].pull(most, 0.0)
                assert [(m.id, m.num_deliveries) for m in messages] == model.pull(name, most)
                deliveries += [(name, message) for message in messages]
            case ("pass", seconds):
                await clock.advance(seconds)
                model.pass_time(seconds)
            case (how, which) if deliveries:
                index = max(len(deliveries) - which, 0)  # one of the last
                name, message = deliveries[index]
                if index in ended:
                    continue
                model_delivery = message.num_deliveries
                if how == "nak":
                    await message.nak(2.0 if model_delivery % 2 else 0.0)
                elif how == "term":
                    await message.term("refused")
                else:
                    await getattr(message, how)()
                ended |= {index} if how != "in_progress" else set()
                model.end(how, name, message.id, model_delivery)
    await all_arrive(transport, clock, model, inboxes)


async def all_arrive(broker: MemoryTransport, clock: FakeClock, model: Model, inboxes: dict[str, Subscription]) -> None:
    """Assert that in the end each name acknowledged each message, or it is dead-lettered."""
    for _ in range(60):
        for name, inbox in inboxes.items():
            messages = await inbox.pull(100, 0.0)
            assert [(m.id, m.num_deliveries) for m in messages] == model.pull(name, 100)
            for message in messages:
                await message.ack()
                model.end("ack", name, message.id, message.num_deliveries)
        await clock.advance(1.0)
        model.pass_time(1.0)
    assert {kind for kind, _ in model.state.values()} <= {"done", "dead"}
    watch = await broker.watch(DEAD)
    letters = [dead_letters.decode(m.data) for m in await watch.pull(1000, 0.0)]
    dead = sorted((letter.consumer, letter.id) for letter in letters)
    assert dead == sorted(key for key, (kind, _) in model.state.items() if kind == "dead")
    assert not broker._subjects[SUBJECT].stored


class HeldConnection:
    """Connection that passes given messages to the reader and answers every request with nothing."""

    is_connected, is_closed, url = True, False, "nats://held"

    def __init__(self) -> None:
        self.clock = SystemClock()
        self.disturbed: set[Callable[[], None]] = set()
        self.asked: list[tuple[str, bytes]] = []
        self.heard: Any = None

    def new_inbox(self) -> str:
        return "_INBOX.held"

    async def listen(self, subject: str, arrived: Callable[[Any], Awaitable[None]]) -> Any:
        self.arrived = arrived
        return self.heard

    def refuse_if_closed(self, subject: str) -> None:
        pass

    async def until_connected(self, seconds: float) -> bool:
        return True

    async def send(self, subject: str, data: bytes, *, reply: str) -> None:
        await self.arrived(SimpleNamespace(reply="", subject=reply, data=b"", headers={"Status": "404"}))

    async def ask(self, subject: str, data: bytes = b"", *, seconds: float) -> SimpleNamespace:
        self.asked.append((subject, data))
        return SimpleNamespace(reply="", headers={}, data=b"")


def delivered(number: int, *, num_deliveries: int) -> SimpleNamespace:
    token = f"$JS.ACK.rlhf_a_sample.reward.{num_deliveries}.{number}.{number}.0.0"
    return SimpleNamespace(reply=token, data=b"", headers={"Nats-Msg-Id": str(number)})


async def test_a_pull_cancelled_during_a_dead_letter_loses_no_message() -> None:
    connection, may_bury, buried = HeldConnection(), asyncio.Event(), list[DeadLetter]()

    async def bury(letter: DeadLetter) -> None:
        await may_bury.wait()
        buried.append(letter)

    reward = Consumer(name="reward", max_deliveries=2)
    consuming: Any = Consuming(connection, "rlhf.a.sample", reward, bury)  # type: ignore[arg-type]
    reading = await PullReading(consuming).open()
    for number, num_deliveries in ((1, 1), (2, 3), (3, 1)):
        await connection.arrived(delivered(number, num_deliveries=num_deliveries))
    pulling = asyncio.create_task(reading.pull(3, 0.0))
    await asyncio.sleep(0)
    pulling.cancel()
    [pulled] = await asyncio.gather(pulling, return_exceptions=True)
    taken = pulled if isinstance(pulled, list) else []
    assert [message.id for message in taken + await reading.pull(3, 0.0)] == ["1", "3"]
    may_bury.set()
    await asyncio.gather(*consuming.tasks)
    assert [letter.id for letter in buried] == ["2"]
    assert [data for _, data in connection.asked] == [b"+ACK"]


async def test_messages_that_come_after_leaving_a_busy_server_are_handed_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server takes longer to confirm than the transport waits."""
    monkeypatch.setattr(module, "_UNSUBSCRIBE_SECONDS", 0.01)
    connection = HeldConnection()
    connection.heard = SimpleNamespace(drain=asyncio.Event().wait)
    reward = Consumer(name="reward", max_deliveries=None)
    consuming: Any = Consuming(connection, "rlhf.a.sample", reward, None)  # type: ignore[arg-type]
    reading = await PullReading(consuming).open()
    await connection.arrived(delivered(1, num_deliveries=1))
    await reading.close()
    await connection.arrived(delivered(2, num_deliveries=1))
    await asyncio.gather(*consuming.tasks)
    assert connection.asked == [(delivered(number, num_deliveries=1).reply, b"-NAK") for number in (1, 2)]
