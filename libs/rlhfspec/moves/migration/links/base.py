"""Contract of a link, which carries bytes by key from one engine's process to another's.

    landing = opening.make_landing("auto")                           # destination: once
    sending = opening.open_sending(landing.offer)                    # source: once per destination

    room = sending.room(4096)                                        # memory to pack into
    sending.send("move-1/0", 4096)

    view = landing.take("move-1/0", 4096, timeout=5.0)               # destination
    landing.done("move-1/0")                                         # frees the memory

All calls block, so use a thread. Every failure is a LinkError within a deadline. After one of `room` or `send`, close
the sending and open another; one of `take` concerns a single key. Links do not verify bytes.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

from rlhfspec.errors import LinkError

MOST_LANDED_BYTES = 256 << 20  # of all ranges that landed and are not done
SECONDS = 10.0  # for the other end to answer, to make room, or to finish a range
KEPT_SECONDS = 60.0  # for ranges that landed and were not taken
MOST_KEY_BYTES = 512


class LandingWay(Protocol):
    way: Mapping[str, Any]

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LandingAddress:
    host: str = "127.0.0.1"
    port: int = 0  # 0: any that is free
    tls: ssl.SSLContext | None = None
    seconds: float = SECONDS


class Sending(Protocol):
    """Source's end of a link, for one thread at a time."""

    def room(self, num_bytes: int) -> memoryview:
        """Wait until earlier ranges leave room, and return writable memory for one range."""
        ...

    def send(self, key: str, num_bytes: int) -> None:
        """Send `num_bytes` of the memory from `room`; return when `room` may be called again."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class QuickSending(Sending, Protocol):
    def is_at_once(self, num_bytes: int) -> bool:
        """Return whether `room(num_bytes)` and the `send` that follows do not block."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Token and addresses (`ways`, by transport) at which a destination receives the KV of one move.

    >>> Offer.of("[]")
    Traceback (most recent call last):
    ...
    rlhfspec.errors.LinkError: offer: is not a link's offer ('[]')
    """

    token: str
    ways: Sequence[Mapping[str, Any]]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def of(cls, text: str) -> Offer:
        try:
            read = json.loads(text)
            token, ways = (
                bytes.fromhex(read["token"]).hex(),
                tuple(dict(way, kind=str(way["kind"])) for way in read["ways"]),
            )
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise LinkError("offer", f"is not a link's offer ({text[:80]!r})") from error
        return cls(token=token, ways=ways)
