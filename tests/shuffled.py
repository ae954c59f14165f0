"""A transport that delivers out of order."""

import random

from rlhfspec.messages.transport.base import Consumer, Message, Subscription
from rlhfspec.messages.transport.memory import MemoryTransport


class ShuffledTransport(MemoryTransport):
    async def subscribe(self, subject: str, consumer: Consumer) -> Subscription:
        return _Shuffled(await super().subscribe(subject, consumer), random.Random(subject + consumer.name))


class _Shuffled:
    def __init__(self, inner: Subscription, draw: random.Random) -> None:
        self._inner = inner
        self._draw = draw
        self._kept: list[Message] = []

    async def pull(self, max_messages: int, timeout_seconds: float) -> list[Message]:
        wait = 0.0 if self._kept else timeout_seconds
        messages = [*self._kept, *await self._inner.pull(64, wait)]
        self._draw.shuffle(messages)
        number = 1 + self._draw.randrange(min(max_messages, 3))
        self._kept = messages[number:]
        return messages[:number]

    async def close(self) -> None:
        await self._inner.close()
