"""Makes either end of a link, of the kinds that `rlhfspec.job.choices.links` lists."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Sequence
from typing import Literal

from rlhfspec.errors import InvalidRequest, LinkError, did_you_mean
from rlhfspec.job.choices.links import AUTO, LINKS
from rlhfspec.moves.migration.links.base import (
    KEPT_SECONDS,
    MOST_LANDED_BYTES,
    SECONDS,
    Landing,
    LandingAddress,
    LandingWay,
    Offer,
    Sending,
)
from rlhfspec.moves.migration.links.inbox import KVInbox


class WaysIn:
    """A landing: all that arrives, by whatever kind, is in one inbox."""

    def __init__(self, inbox: KVInbox, token: str, ways: Sequence[LandingWay]) -> None:
        self.inbox = inbox
        self._ways = ways
        self._offer = Offer(token=token, ways=[each.way for each in ways]).to_json()

    @property
    def offer(self) -> str:
        return self._offer

    def take(self, key: str, num_bytes: int, *, timeout: float) -> memoryview:
        return self.inbox.take(key, num_bytes, timeout=timeout)

    def has(self, key: str) -> bool:
        return self.inbox.has(key)

    def done(self, key: str) -> None:
        self.inbox.done(key)

    def close(self) -> None:
        self.inbox.close()  # nobody waits for room any more
        for way in self._ways:
            way.close()


def make_landing(
    kind: str = "auto",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    most_bytes: int = MOST_LANDED_BYTES,
    seconds: float = SECONDS,
    kept_seconds: float = KEPT_SECONDS,
    nixl_by: Literal["read", "write"] = "read",
) -> Landing:
    """`host`, `port`: to listen at, and where others find it. `tls`: of a server, for ways between hosts.

    >>> landing = make_landing("memory")
    >>> sending = open_sending(landing.offer)
    >>> sending.room(2)[:] = b"ab"
    >>> sending.send("move/0", 2); bytes(landing.take("move/0", 2, timeout=1.0))
    b'ab'
    >>> sending.close(); landing.close()
    >>> make_landing("pipe")
    Traceback (most recent call last):
    ...
    rlhfspec.errors.InvalidRequest: link: must be one of auto, memory, shm, tcp, nixl, torch (got 'pipe')
    """
    if kind not in (AUTO, *LINKS):
        problem = f"must be one of {', '.join((AUTO, *LINKS))}{did_you_mean(kind, LINKS)}"
        raise InvalidRequest("link", kind, problem)
    token, inbox = secrets.token_hex(32), KVInbox(most_bytes, kept_seconds=kept_seconds)
    at = LandingAddress(host=host, port=port, tls=tls, seconds=seconds, nixl_by=nixl_by)
    offered = [each for each in LINKS.values() if each.in_auto and each.is_possible] if kind == AUTO else [LINKS[kind]]
    ways: list[LandingWay] = [each.load()(inbox, token, at) for each in offered]
    return WaysIn(inbox, token, ways)


def open_sending(offer: str, *, tls: ssl.SSLContext | None = None, seconds: float = SECONDS) -> Sending:
    """By the first way of the offer that both ends share. `seconds`: how long each call may take."""
    read = Offer.of(offer)
    for way in read.ways:
        link = LINKS.get(way["kind"])
        if link is not None and link.is_possible:
            sending: Sending | None = link.load_connect()(way, read.token, tls=tls, seconds=seconds)
            if sending is not None:
                return sending
    kinds = ", ".join(str(way["kind"])[:20] for way in read.ways[:8])
    raise LinkError("offer", f"no way of it leads there from here ({kinds})")
