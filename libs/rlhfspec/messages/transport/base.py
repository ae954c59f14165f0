"""Contract of message transport between stages, with JetStream's semantics.

A subject is declared, with its kind, before anything is published on it or read from it:

- *work* is kept until every declared consumer acknowledged it. Subscriptions of one consumer compete for messages; each
  consumer sees every message. Without declared consumers, nothing is kept.
- *state* keeps the latest message of each key. A watcher sees these first, then new ones.
- *signal* keeps nothing. A watcher sees new messages only, and may miss some.

Rules of work:

- A message that is nak'ed, or not acknowledged within `ack_wait_seconds`, is redelivered before new messages, expired
  ones oldest first. `in_progress` restarts the ack wait.
- After `max_deliveries` a message becomes a dead letter, written by its holder or reader.
- Publishing is de-duplicated by id, while the message is kept and for a time after.
- A late acknowledgement still counts, because the work is done.
- Backpressure: a consumer never holds more than `max_unacknowledged` messages. `publish` waits while a subject has
  `max_pending` unacknowledged messages, and raises `TransportFull` at its timeout.

Nothing waits for watchers: they acknowledge nothing, and lose the oldest messages if they are too slow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["work", "state", "signal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A name under which work is pulled. `max_deliveries` None: no limit."""

    name: str
    ack_wait_seconds: float = 15.0
    max_deliveries: int | None = 5
    max_unacknowledged: int = 1024


class Receipt(Protocol):
    """The right to end one delivery, once, by ack, nak or term; for state and signals all calls do nothing."""

    @property
    def token(self) -> str:
        """Return a token by which any process may end the delivery (`Transport.adopt`)."""

    @property
    def num_deliveries(self) -> int: ...

    async def ack(self) -> None:
        """Mark the work as done, so that it is never delivered to this consumer again."""

    async def nak(self, delay_seconds: float = 0.0) -> None:
        """Return the message for redelivery after the delay."""

    async def in_progress(self) -> None:
        """Extend the lease: the acknowledgement's deadline starts anew."""

    async def term(self, reason: str) -> None:
        """Move the message to the dead letters, with the reason."""


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
    """A message that a watcher received, with nothing to end."""

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
        """Return 1 to `max_messages` messages as soon as there is one, or an empty list at the timeout."""

    async def close(self) -> None: ...


class Transport(Protocol):
    async def declare(self, subject: str, kind: Kind, consumers: Iterable[Consumer] = ()) -> None:
        """Open a subject. Repeated calls must have the same settings."""

    async def publish(
        self, subject: str, data: bytes, *, id: str, key: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        """Publish a message durably; return False if its id is already there. `key`: of state."""

    async def subscribe(self, subject: str, consumer: Consumer) -> Subscription:
        """Pull work as a consumer that was declared before."""

    async def watch(self, subject: str) -> Subscription:
        """Watch a subject: first the latest values of state, then everything published from now on."""

    async def release(self, subject: str, name: str) -> None:
        """Redeliver at once all messages held under this name; only for a consumer whose single worker is dead."""

    async def adopt(self, token: str, subject: str, name: str) -> Receipt:
        """Return the receipt of a delivery made anywhere; raise InvalidRequest for another subject or consumer."""

    async def close(self) -> None: ...
