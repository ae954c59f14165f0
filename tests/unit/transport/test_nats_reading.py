"""NATS pulling over a scripted connection, for rare server behaviour."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rlhfspec.messages.transport.base import Consumer
from rlhfspec.messages.transport.clock import SystemClock
from rlhfspec.messages.transport.dead_letters import DeadLetter
from rlhfspec.messages.transport.jetstream import reading as module
from rlhfspec.messages.transport.jetstream.deliveries import Consuming
from rlhfspec.messages.transport.jetstream.reading import PullReading


class HeldConnection:
    """Connection that passes given messages to the reader and answers every request with nothing."""

    is_connected, is_closed, patience_seconds, url = True, False, 1.0, "nats://held"

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


async def test_a_pull_that_is_given_up_while_a_message_is_buried_loses_none_and_buries_it() -> None:
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


async def test_what_comes_to_who_has_left_a_busy_server_goes_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server takes longer to confirm than the transport waits."""
    monkeypatch.setattr(module, "_CLOSE_SECONDS", 0.01)
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
