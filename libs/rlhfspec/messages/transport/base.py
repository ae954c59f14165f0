"""Contract of message transport between stages, with JetStream's semantics.

A subject is declared with its kind before use:

- *work* is kept until every declared consumer has acknowledged it. Subscriptions of one consumer compete for messages.
  Without declared consumers, nothing is kept.
- *state* keeps the latest message of each key. A watcher first sees these, then new messages.
- *signal* keeps nothing. A watcher sees only new messages and may miss some.

Rules of work:

- A message that is nak'ed, or not acknowledged within `ack_wait_seconds`, is redelivered before new messages, expired
  ones oldest first. `in_progress` restarts the ack wait.
- After `max_deliveries` a message becomes a dead letter, written by its holder or reader.
- Publishing is deduplicated by id while the message is kept and for a time after.
- A late acknowledgement still counts.
- A consumer holds at most `max_unacknowledged` messages. `publish` waits while a subject has `max_pending` of them, and
  raises `TransportFull` at its timeout.

Watchers acknowledge nothing, and slow ones lose the oldest messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["work", "state", "signal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """Named consumer of work; `max_deliveries` None means no limit."""

    name: str
    ack_wait_seconds: float = 15.0
    max_deliveries: int | None = 5
    max_unacknowledged: int = 1024


class Receipt(Protocol):
    """Handle to end a delivery by ack, nak or term; a no-op for state and signals."""

    @property
    def token(self) -> str:
        """Return a token with which any process may end the delivery (`Transport.adopt`)."""

    @property
    def num_deliveries(self) -> int: ...

    async def ack(self) -> None:
        """Mark the work as done; this consumer never receives it again."""

    async def nak(self, delay_seconds: float = 0.0) -> None:
        """Return the message for redelivery after the delay."""

    async def in_progress(self) -> None:
        """Extend the lease by restarting the ack wait."""

    async def term(self, reason: str) -> None:
        """Move the message to the dead letters with a reason."""


class Message(Receipt, Protocol):
    @property
    def subject(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


class SeenMessage:
    """Message received by a watcher; its receipt methods do nothing."""

    token = ""
    num_deliveries = 1

    def __init__(self, subject: str, id: str, data: bytes, headers: Mapping[str, str]) -> None:
        self.subject = subject
        self.id = id
        self.data = data
        self.headers = headers

    async def _nothing(self, *_: object, **__: object) -> None: ...

    ack = nak = in_progress = term = _nothing


class Subscription(Protocol):
    async def pull(self, max_messages: int, timeout_seconds: float) -> list[Message]:
        """Return up to `max_messages` as soon as there is one, or [] at the timeout."""

    async def close(self) -> None: ...


class Transport(Protocol):
    async def declare(self, subject: str, kind: Kind, consumers: Iterable[Consumer] = ()) -> None:
        """Declare a subject; repeated calls must have the same settings."""

    async def publish(
        self, subject: str, data: bytes, *, id: str, key: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        """Publish a message; return False if its id was already published. Only state subjects use `key`."""

    async def subscribe(self, subject: str, consumer: Consumer) -> Subscription:
        """Return a subscription to work as a declared consumer."""

    async def watch(self, subject: str) -> Subscription:
        """Watch a subject: first the latest state of each key, then new messages."""

    async def release(self, subject: str, name: str) -> None:
        """Redeliver all messages that the consumer `name` holds; its only worker must be dead."""

    async def adopt(self, token: str, subject: str, name: str) -> Receipt:
        """Return the receipt of a token's delivery; raise InvalidRequest for another subject or consumer."""

    async def close(self) -> None: ...
