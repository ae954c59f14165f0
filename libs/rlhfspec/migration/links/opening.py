"""Makes either end of a link. What a kind needs is imported when it is wanted."""

from __future__ import annotations

import secrets
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

from rlhfspec.errors import InvalidRequest, LinkError, did_you_mean
from rlhfspec.migration.links import memory, shm, tcp
from rlhfspec.migration.links.base import KEPT_SECONDS, KINDS, MOST_BYTES, SECONDS, Landing, Offer, Sending
from rlhfspec.migration.links.inbox import Inbox


class Way(Protocol):
    """One kind of link into an inbox. `way`: where sources find it."""

    way: Mapping[str, Any]

    def close(self) -> None: ...


class WaysIn:
    """A landing: all that arrives, by whatever kind, is in one inbox."""

    def __init__(self, inbox: Inbox, token: str, ways: Sequence[Way]) -> None:
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
    most_bytes: int = MOST_BYTES,
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
    if kind not in ("auto", *KINDS):
        hint = did_you_mean(kind, KINDS)
        raise InvalidRequest("link", kind, f"must be one of auto, {', '.join(KINDS)}{hint}")
    token, inbox = secrets.token_hex(32), Inbox(most_bytes, kept_seconds=kept_seconds)
    ways: list[Way] = []
    if kind in ("auto", "memory"):
        ways.append(memory.MemoryWay(inbox, token))
    if kind == "shm" or (kind == "auto" and shm.IS_POSSIBLE):
        ways.append(shm.ShmWay(inbox, token, seconds=seconds))
    if kind in ("auto", "tcp"):
        ways.append(tcp.TcpWay(inbox, token, host=host, port=port, tls=tls, seconds=seconds))
    if kind == "nixl":
        from rlhfspec.migration.links import nixl

        ways.append(nixl.NixlWay(inbox, token, host=host, port=port, by=nixl_by, tls=tls, seconds=seconds))
    if kind == "torch":
        from rlhfspec.migration.links import torch_link

        ways.append(torch_link.TorchWay(inbox, token, host=host, port=port, tls=tls, seconds=seconds))
    return WaysIn(inbox, token, ways)


def open_sending(offer: str, *, tls: ssl.SSLContext | None = None, seconds: float = SECONDS) -> Sending:
    """By the first way of the offer that both ends share. `seconds`: how long each call may take."""
    read = Offer.of(offer)
    for way in read.ways:
        if way["kind"] == "memory" and memory.is_here(way, read.token):
            return memory.MemorySending(way, read.token, seconds=seconds)
        if way["kind"] == "shm" and shm.IS_POSSIBLE and way.get("host") == shm.this_host():
            return shm.ShmSending(way, read.token, seconds=seconds)
        if way["kind"] == "tcp":
            return tcp.TcpSending(way, read.token, tls=tls, seconds=seconds)
        if way["kind"] == "nixl":
            from rlhfspec.migration.links import nixl

            return nixl.NixlSending(way, read.token, tls=tls, seconds=seconds)
        if way["kind"] == "torch":
            from rlhfspec.migration.links import torch_link

            return torch_link.TorchSending(way, read.token, tls=tls, seconds=seconds)
    kinds = ", ".join(str(way["kind"])[:20] for way in read.ways[:8])
    raise LinkError("offer", f"no way of it leads there from here ({kinds})")
