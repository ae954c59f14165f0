"""How bytes travel between stages: publish, pull, acknowledge. The semantics are JetStream's; `memory` ships beside it.

A subject is declared, with its kind, before anything is published on it or read from it; what it is for decides what
is kept:

- *work* is kept until every declared consumer acknowledged it. Subscriptions of one consumer compete (each message
  goes to one of them); each consumer sees every message. Declared without consumers, nothing is kept.
- *state* keeps the latest message of each key. A watcher sees these first, then whatever comes.
- *signal* keeps nothing. A watcher sees what comes while it watches, and may miss some.

Of work:
- Not acknowledged within `ack_wait_seconds` of a delivery, or nak'ed: delivered again, after the delay, and before
  what is new; what expired comes oldest first. `in_progress` starts the waiting time anew.
- After `max_deliveries` a message becomes a dead letter (`dead_letters`), which its holder or reader writes.
- Publishing is de-duplicated by id, while the message is kept and for a time after: False means that it is there.
- An acknowledgement that comes after its deadline still counts: the work is done.
- Backpressure: a consumer never holds more than `max_unacknowledged` messages; `publish` waits while a subject holds
  `max_pending` messages that some consumer has yet to acknowledge, and raises `TransportFull`, naming the consumers,
  when that takes too long.

A watcher is never waited for: it acknowledges nothing, and of what it is too slow to read the oldest is lost.

Example:
    >>> Consumer(name="reward").max_deliveries
    5
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["work", "state", "signal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumer:
    """A name under which work is pulled. `max_deliveries` None: as often as it takes."""

    name: str
    ack_wait_seconds: float = 15.0
    max_deliveries: int | None = 5
    max_unacknowledged: int = 1024


class Receipt(Protocol):
    """The right to end one delivery. Exactly one of ack, nak and term ends it; after that all of them do nothing.

    Of state and signals there is nothing to end: all four do nothing.
    """

    @property
    def token(self) -> str:
        """Any process may end the delivery with it (`Transport.adopt`). Empty for state and signals."""
        ...

    @property
    def num_deliveries(self) -> int:
        """1 the first time."""
        ...

    async def ack(self) -> None:
        """Done: never delivered to this consumer again."""
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


class Message(Receipt, Protocol):
    """One delivery."""

    @property
    def subject(self) -> str: ...
    @property
    def id(self) -> str: ...
    @property
    def data(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


class SeenMessage:
    """A message that a watcher got: there is nothing to end."""

    token = ""
    num_deliveries = 1

    def __init__(self, subject: str, id: str, data: bytes, headers: Mapping[str, str]) -> None:
        self.subject = subject
        self.id = id
        self.data = data
        self.headers = headers

    async def ack(self) -> None:
        pass

    async def nak(self, delay_seconds: float = 0.0) -> None:
        pass

    async def in_progress(self) -> None:
        pass

    async def term(self, reason: str) -> None:
        pass


class Subscription(Protocol):
    async def pull(self, max_messages: int, timeout_seconds: float) -> list[Message]:
        """At least one message as soon as there is one, at most `max_messages`; an empty list at the timeout."""
        ...

    async def close(self) -> None: ...


class Transport(Protocol):
    async def declare(self, subject: str, kind: Kind, consumers: Iterable[Consumer] = ()) -> None:
        """Opens a subject. May be said again, with the same settings only."""
        ...

    async def publish(
        self, subject: str, data: bytes, *, id: str, key: str = "", headers: Mapping[str, str] | None = None
    ) -> bool:
        """Durably there when this returns. False: the id is there already. Work waits for room (backpressure).

        `key`: of state, whose latest value this becomes.
        """
        ...

    async def subscribe(self, subject: str, consumer: Consumer) -> Subscription:
        """Pulls work as a consumer that was declared so; declares nothing."""
        ...

    async def watch(self, subject: str) -> Subscription:
        """Looks on: of state the latest values first, then whatever is published from now on."""
        ...

    async def release(self, subject: str, name: str) -> None:
        """Declare dead what held messages under this name: they are delivered again at once, not after the ack wait.

        Only for a consumer with one worker; a living competitor would see its messages given to another.
        """
        ...

    async def adopt(self, token: str, subject: str, name: str) -> Receipt:
        """The delivery of that token, wherever it was made. Raises InvalidRequest for one of another subject or
        consumer."""
        ...

    async def close(self) -> None: ...
