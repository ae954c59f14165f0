"""The links of one process: where KV lands here, and an open way to each process that it was ever sent to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from rlhfspec.errors import LinkError
from rlhfspec.moves.migration.links.base import Landing, QuickSending, Sending

_NUM_THREADS = 8  # that wait in links: neither the event loop nor the engine ever does
T = TypeVar("T")


@dataclass(slots=True)
class SendingWay:
    """To one offer. `lock`: a link has one room at a time."""

    sending: Sending | None = None
    is_at_once: bool = False  # what there was room for can be sent without a thread
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Links:
    """`open_sending`: as `links.opening` has it, with what TLS it needs."""

    def __init__(self, landing: Landing, open_sending: Callable[[str], Sending]) -> None:
        self.landing = landing
        self._open = open_sending
        self._ways: dict[str, SendingWay] = {}
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="moves")

    async def in_thread(self, do: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, do)

    def way(self, offer: str) -> SendingWay:
        return self._ways.setdefault(offer, SendingWay())

    async def room(self, way: SendingWay, offer: str, num_bytes: int) -> memoryview:
        """With the way's lock held. Raises LinkError; then the next one opens it anew."""

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
        """What was packed into its room. Raises LinkError."""
        sending = way.sending
        assert sending is not None, "nothing was packed"
        if way.is_at_once:
            sending.send(key, num_bytes)
        else:
            await self.in_thread(lambda: sending.send(key, num_bytes))

    def drop(self, way: SendingWay, offer: str) -> None:
        """It failed."""
        self._ways.pop(offer, None)
        sending, way.sending = way.sending, None
        if sending is not None:
            self._threads.submit(sending.close)

    def close(self) -> None:
        """Blocks until its threads are gone."""
        for way in self._ways.values():
            if way.sending is not None:
                way.sending.close()
        self._ways.clear()
        self.landing.close()
        self._threads.shutdown(wait=True)
