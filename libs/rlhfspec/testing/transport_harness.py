"""Transport under test with its clock, for `TransportContract`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from rlhfspec.messages.transport.base import Consumer, Message, Subscription, Transport
from rlhfspec.messages.transport.clock import FakeClock

SUBJECT = "rlhf.sums.sample"
DEAD = "rlhf.sums.dead"


class TransportHarness:
    """Transport with its clock. Without a fake clock, `advance` sleeps."""

    def __init__(self, transport: Transport, clock: FakeClock | None = None) -> None:
        self.transport = transport
        self._clock = clock

    async def advance(self, seconds: float) -> None:
        await (self._clock.advance(seconds) if self._clock else asyncio.sleep(seconds))

    async def meanwhile(self, seconds: float, call: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.create_task(call)
        await self.advance(seconds)
        return await asyncio.wait_for(task, timeout=10)

    async def publish(self, *ids: str) -> list[bool]:
        return [await self.transport.publish(SUBJECT, id.encode(), id=id) for id in ids]

    async def open(self, *names: str, **options: Any) -> list[Subscription]:
        consumers = [Consumer(name=name, **options) for name in names]
        await self.transport.declare(SUBJECT, "work", dict.fromkeys(consumers))
        await self.transport.declare(DEAD, "state")
        return [await self.transport.subscribe(SUBJECT, consumer) for consumer in consumers]

    async def now(self, subscription: Subscription, most: int = 100) -> list[Message]:
        """Return all messages available now, by repeated pulls."""
        found: list[Message] = []
        while len(found) < most and (more := await self.meanwhile(0.1, subscription.pull(most - len(found), 0.05))):
            found += more
        return found


def ids(messages: list[Message]) -> list[str]:
    return [message.id for message in messages]
