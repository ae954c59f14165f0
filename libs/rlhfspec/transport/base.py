"""How bytes travel between stages: publish, pull, acknowledge. The semantics are JetStream's; `memory` ships beside it.

- Who will read a subject is declared before anything is published on it. A message is kept until every name declared
  or subscribed has acknowledged it; declared for nobody, it is not kept; undeclared, it waits for a first reader.
- Subscriptions with one consumer name compete (each message goes to one of them); different names each see every
  message, also those published before they subscribed. An undeclared name sees what is still kept when it subscribes.
- Not acknowledged within `ack_wait_seconds` of a delivery, or nak'ed: delivered again, after the delay, oldest first.
  `in_progress` starts the waiting time anew. After `max_deliveries` the message goes to the dead-letter subject.
- Publishing is de-duplicated by id: the second publication of an id changes nothing and returns False.
- An acknowledgement that comes after its deadline still counts: the work is done.
- Backpressure: a consumer never holds more than `max_unacknowledged` messages; `publish` waits while a subject holds
  `max_pending` messages that some consumer has yet to acknowledge, and raises `TransportFull`, naming the consumers,
  when that takes too long.

Example:
    >>> Consumer(name="reward", ack_wait_seconds=30.0).max_deliveries
    5
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """Who pulls. Waits in seconds; defaults suit a stage whose work on one message takes well under a minute."""

    name: str
    ack_wait_seconds: float = 60.0
    max_deliveries: int = 5
    max_unacknowledged: int = 1024


class Message(Protocol):
    """One delivery. Exactly one of ack, nak and term ends it; after that all of them do nothing."""

    @property
    def subject(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def num_deliveries(self) -> int:
        """1 the first time."""
        ...

    async def ack(self) -> None:
        """Done: never delivered to this consumer name again."""
        ...

    async def nak(self, delay_seconds: float = 0.0) -> None:
        """Not now: deliver it again after the delay."""
        ...

    async def in_progress(self) -> None:
        """Still at it: the acknowledgement's deadline starts anew."""
        ...

    async def term(self, reason: str) -> None:
        """Never again: to the dead letters, with the reason."""
        ...


class Subscription(Protocol):
    async def pull(self, max_messages: int, timeout_seconds: float) -> list[Message]:
        """At least one message as soon as there is one, at most `max_messages`; an empty list at the timeout."""
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    async def declare(self, subject: str, names: Iterable[str]) -> None:
        """These consumer names will read the subject; what is published is kept for them. May be said again."""
        ...

    async def publish(self, subject: str, data: bytes, *, id: str) -> bool:
        """Durably there when this returns. False: the id was there already. Waits for room (backpressure)."""
        ...

    async def subscribe(self, subject: str, consumer: Consumer) -> Subscription: ...

    async def close(self) -> None: ...
