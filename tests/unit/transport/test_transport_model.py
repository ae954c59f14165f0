"""Random interleavings of message events against a slow model."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec.messages.transport import dead_letters
from rlhfspec.messages.transport.base import Consumer, Message, Subscription
from rlhfspec.messages.transport.clock import FakeClock
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.messages.transport.memory_subjects import WorkSubject

SUBJECT = "rlhf.sums.sample"
DEAD = "rlhf.sums.dead"
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
    consumers = [
        Consumer(name=n, ack_wait_seconds=ACK_WAIT, max_deliveries=MAX_DELIVERIES, max_unacknowledged=MAX_HELD)
        for n in NAMES
    ]
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
    await everything_arrives(transport, clock, model, inboxes)


async def everything_arrives(
    transport: MemoryTransport, clock: FakeClock, model: Model, inboxes: dict[str, Subscription]
) -> None:
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
    watch = await transport.watch(DEAD)
    letters = [dead_letters.decode(m.data) for m in await watch.pull(1000, 0.0)]
    dead = sorted((letter.consumer, letter.id) for letter in letters)
    assert dead == sorted(key for key, (kind, _) in model.state.items() if kind == "dead")
    work = transport._subjects[SUBJECT]
    assert isinstance(work, WorkSubject)
    assert not work.stored
