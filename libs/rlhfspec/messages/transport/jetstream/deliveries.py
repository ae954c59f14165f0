"""Deliveries of work, and dead letters of messages that no holder could handle.

The server accepts a nak from any former holder. Therefore a delivery sends none near its deadline or after it; an
acknowledgement is valid at any time.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg

from rlhfspec.errors import InvalidRequest, TransportUnavailable
from rlhfspec.messages.transport.base import Consumer, SeenMessage
from rlhfspec.messages.transport.dead_letters import DeadLetter
from rlhfspec.messages.transport.jetstream.connection import RETRY_SECONDS, Connection, status_of
from rlhfspec.messages.transport.jetstream.streams import DUPLICATE_WINDOW_SECONDS, SECOND, stream_name

log = logging.getLogger("rlhfspec.messages.transport")
ID = "Nats-Msg-Id"  # by which the server recognises duplicates
Bury = Callable[[DeadLetter], Awaitable[None]]
NUM_REMEMBERED = 1 << 16  # acknowledged messages per consumer, in case of redelivery
ACK_SECONDS = 1.0  # then an acknowledgement is repeated
_NO_NAK_SHARE = 0.25  # last part of a lease: the server counts from when it sent the message, which came here later


@dataclass(frozen=True, slots=True)
class Token:
    """Parsed acknowledgement subject of a delivery.

    >>> Token.parse("$JS.ACK.rlhf_sums_sample.reward.2.17.31.1795364592212657891.0")
    Token(stream='rlhf_sums_sample', consumer='reward', num_deliveries=2, number=17)
    """

    stream: str
    consumer: str
    num_deliveries: int
    number: int  # of the message in its stream

    @classmethod
    def parse(cls, token: str) -> Token:
        words = token.split(".")
        if len(words) > 9:  # preceded by domain and account
            words = words[:2] + words[4:]
        if len(words) < 9 or words[:2] != ["$JS", "ACK"] or not (words[4].isdigit() and words[5].isdigit()):
            raise InvalidRequest("token", token, "is not a delivery token")
        return cls(words[2], words[3], int(words[4]), int(words[5]))


class Consuming:
    """State shared by one consumer's deliveries."""

    def __init__(self, connection: Connection, subject: str, consumer: Consumer, bury: Bury) -> None:
        self.connection = connection
        self.subject = subject
        self.consumer = consumer
        self.bury = bury
        self.tasks: set[asyncio.Task[None]] = set()
        self._done: dict[str, float] = {}  # time of acknowledgement by id, oldest first

    def is_done(self, id: str) -> bool:
        """Return whether this process acknowledged message `id` lately; a killed server may deliver it again."""
        return time.monotonic() - self._done.get(id, -math.inf) < DUPLICATE_WINDOW_SECONDS

    async def acknowledge(self, token: str, number: int, id: str = "") -> None:
        """Acknowledge until the server confirms, or has forgotten the delivery and will redeliver it (`is_done`)."""
        connection = self.connection
        self._remember(id)
        began = connection.clock.now()
        while True:
            answer = await connection.ask(token, b"+ACK", seconds=ACK_SECONDS)
            if answer is not None and status_of(answer) != "503":
                return
            if answer is None and connection.is_connected and await self._forgot(number):
                return
            if connection.left(began) <= 0:
                raise TransportUnavailable(connection.url, f"{token} is not confirmed")
            await connection.clock.sleep(RETRY_SECONDS)

    def _remember(self, id: str) -> None:
        self._done.pop(id, None)
        if id:
            self._done[id] = time.monotonic()
        if len(self._done) > NUM_REMEMBERED:
            del self._done[next(iter(self._done))]

    async def _forgot(self, number: int) -> bool:
        info = await self.connection.api(f"CONSUMER.INFO.{stream_name(self.subject)}.{self.consumer.name}")
        return "error" in info or info["delivered"]["stream_seq"] < number

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("%s of %s: %s", self.consumer.name, self.subject, error)

    @property
    def lost_reason(self) -> str:
        return f"no acknowledgement within {self.consumer.ack_wait_seconds:g} s"

    def is_last(self, num_deliveries: int) -> bool:
        most = self.consumer.max_deliveries
        return most is not None and num_deliveries >= most

    async def data_of(self, number: int) -> tuple[str, bytes] | None:
        found = await self.connection.api(f"STREAM.MSG.GET.{stream_name(self.subject)}", {"seq": number})
        if "error" in found:
            return None
        id = headers_of(found["message"].get("hdrs", "")).get(ID, "")
        return id, base64.b64decode(found["message"].get("data", ""))

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


class NatsReceipt:
    """Receipt of one delivery with its deadline."""

    def __init__(self, consuming: Consuming, token: str) -> None:
        self._consuming = consuming
        self.token = token
        self._parsed = Token.parse(token)
        self.num_deliveries = self._parsed.num_deliveries
        self._ended = False
        self._hold()

    @property
    def is_held(self) -> bool:
        """Return whether the lease is still valid by the system's monotonic clock."""
        return time.monotonic() < self._deadline

    async def ack(self) -> None:
        if self._ends():
            await self._acknowledge()

    async def nak(self, delay_seconds: float = 0.0) -> None:
        left = self._deadline - time.monotonic()
        if left < _NO_NAK_SHARE * self._consuming.consumer.ack_wait_seconds or not self._ends():
            return
        if self._consuming.is_last(self.num_deliveries):
            await self._bury(f"refused after {self.num_deliveries} deliveries")
            return
        delay = json.dumps({"delay": round(delay_seconds * SECOND)}) if delay_seconds > 0 else ""
        # Sent once only: a repetition could take the message from its next holder. If lost, the deadline suffices.
        await self._consuming.connection.ask(self.token, f"-NAK {delay}".rstrip().encode(), seconds=ACK_SECONDS)

    async def in_progress(self) -> None:
        if self.is_held and not self._ended:
            if self._consuming.connection.is_connected:
                self._hold()
            await self._consuming.connection.send(self.token, b"+WPI")

    async def term(self, reason: str) -> None:
        if self._ends():
            await self._bury(reason)

    async def content(self) -> tuple[str, bytes] | None:
        return await self._consuming.data_of(self._parsed.number)

    async def _bury(self, reason: str) -> None:
        if (content := await self.content()) is not None:
            id, data = content
            most = self._consuming.consumer.max_deliveries
            letter = DeadLetter(
                subject=self._consuming.subject,
                id=id,
                consumer=self._consuming.consumer.name,
                num_deliveries=self.num_deliveries if most is None else min(self.num_deliveries, most),
                reason=reason,
                data=data,
            )
            await self._consuming.bury(letter)
        await self._acknowledge()

    async def _acknowledge(self) -> None:
        await self._consuming.acknowledge(self.token, self._parsed.number)

    def _hold(self) -> None:
        self._deadline = time.monotonic() + self._consuming.consumer.ack_wait_seconds

    def _ends(self) -> bool:
        before, self._ended = self._ended, True
        return not before


class NatsMessage(NatsReceipt):
    def __init__(self, consuming: Consuming, message: Msg) -> None:
        super().__init__(consuming, message.reply)
        headers = message.headers or {}
        self.subject = consuming.subject
        self.id = headers.get(ID, "")
        self.data = message.data
        self.headers = without_ours(headers)

    async def content(self) -> tuple[str, bytes] | None:
        return self.id, self.data

    async def _acknowledge(self) -> None:
        await self._consuming.acknowledge(self.token, self._parsed.number, self.id)

    @property
    def is_done(self) -> bool:
        return self._consuming.is_done(self.id)

    def is_one_too_many(self) -> bool:
        """Return whether this delivery exceeds `max_deliveries`; if so, move the message to the dead letters."""
        most = self._consuming.consumer.max_deliveries
        if most is None or self.num_deliveries <= most:
            return False
        if self._ends():
            self._consuming.start(self._bury(self._consuming.lost_reason))
        return True

    def watch_over(self) -> None:
        """Move the message to the dead letters if its last delivery expires."""
        if self._consuming.is_last(self.num_deliveries):
            self._consuming.start(self._bury_in_time())

    async def _bury_in_time(self) -> None:
        while not self._ended and (left := self._deadline - time.monotonic()) > 0:
            await asyncio.sleep(left)
        if self._ends():
            await self._bury(self._consuming.lost_reason)


def seen(subject: str, data: bytes, headers: Mapping[str, str]) -> SeenMessage:
    return SeenMessage(subject, headers.get(ID, ""), data, without_ours(headers))


def without_ours(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if not name.startswith("Nats-")}


def headers_of(stored: str) -> dict[str, str]:
    lines = base64.b64decode(stored).decode().split("\r\n")[1:]
    return {name: value.strip() for name, colon, value in (line.partition(":") for line in lines) if colon}
