"""Factories of links' ends (landing, sending), and a process's open links."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from rlhfspec.errors import InvalidRequest, LinkError, did_you_mean
from rlhfspec.job.choices.links import AUTO, LINKS
from rlhfspec.moves.migration.links.base import MOST_LANDED_BYTES, SECONDS, LandingAddress, Offer, QuickSending, Sending
from rlhfspec.moves.migration.links.inbox import Landing

_NUM_LINK_THREADS = 8  # that block on links, so that neither event loop nor engine does
T = TypeVar("T")


def make_landing(
    kind: str = "auto",
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ssl.SSLContext | None = None,
    most_bytes: int = MOST_LANDED_BYTES,
    seconds: float = SECONDS,
) -> Landing:
    """Open the destination's end of links (`kind`: the transport); `tls` is for links between hosts.

    >>> landing = make_landing("memory")
    >>> sending = open_sending(landing.offer)
    >>> sending.room(2)[:] = b"ab"
    >>> sending.send("move/0", 2); bytes(landing.take("move/0", 2, timeout=1.0))
    b'ab'
    >>> sending.close(); landing.close()
    """
    if kind not in (AUTO, *LINKS):
        problem = f"must be one of {', '.join((AUTO, *LINKS))}{did_you_mean(kind, LINKS)}"
        raise InvalidRequest("link", kind, problem)
    at = LandingAddress(host=host, port=port, tls=tls, seconds=seconds)
    offered = [each for each in LINKS.values() if each.in_auto and each.is_possible] if kind == AUTO else [LINKS[kind]]
    return Landing([each.load() for each in offered], at, most_bytes=most_bytes)


def open_sending(offer: str, *, tls: ssl.SSLContext | None = None, seconds: float = SECONDS) -> Sending:
    """Open the source's end by the first transport of the offer that both support."""
    read = Offer.of(offer)
    for way in read.ways:
        link = LINKS.get(way["kind"])
        if link is not None and link.is_possible:
            sending: Sending | None = link.load_connect()(way, read.token, tls=tls, seconds=seconds)
            if sending is not None:
                return sending
    kinds = ", ".join(str(way["kind"])[:20] for way in read.ways[:8])
    raise LinkError("offer", f"none of its links can be used from here ({kinds})")


@dataclass(slots=True)
class SendingWay:
    sending: Sending | None = None
    is_at_once: bool = False  # the present room can be sent without a thread
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Links:
    """Inbox of this process and one outgoing connection per destination."""

    def __init__(self, landing: Landing, open_sending: Callable[[str], Sending]) -> None:
        self.landing = landing
        self._open = open_sending
        self._ways: dict[str, SendingWay] = {}
        self._threads = ThreadPoolExecutor(_NUM_LINK_THREADS, thread_name_prefix="moves")

    async def in_thread(self, do: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    def way(self, offer: str) -> SendingWay:
        return self._ways.setdefault(offer, SendingWay())

    async def room(self, way: SendingWay, offer: str, num_bytes: int) -> memoryview:
        """Return memory to pack into, while the caller holds `way.lock`; after a LinkError, `drop` the way."""
        sending = way.sending
        try:
            way.is_at_once = isinstance(sending, QuickSending) and sending.is_at_once(num_bytes)
        except OSError as error:
            raise LinkError("connection", f"broke ({error.strerror or error})") from error
        if way.is_at_once and sending is not None:
            return sending.room(num_bytes)

        def open_and_ask() -> memoryview:
            if way.sending is None:
                way.sending = self._open(offer)
            return way.sending.room(num_bytes)

        return await self.in_thread(open_and_ask)

    async def send(self, way: SendingWay, key: str, num_bytes: int) -> None:
        sending = way.sending
        assert sending is not None, "nothing was packed"
        if way.is_at_once:
            sending.send(key, num_bytes)
        else:
            await self.in_thread(lambda: sending.send(key, num_bytes))

    def drop(self, way: SendingWay, offer: str) -> None:
        self._ways.pop(offer, None)
        sending, way.sending = way.sending, None
        if sending is not None:
            self._threads.submit(sending.close)

    def close(self) -> None:
        """Close all links, blocking until their threads have ended."""
        for way in self._ways.values():
            if way.sending is not None:
                way.sending.close()
        self._ways.clear()
        self.landing.close()
        self._threads.shutdown(wait=True)
