"""Readers of NATS subjects: `PullReading` takes work from a consumer, `WatchReading` observes messages.

A pull that waits requests one message, because a request for many stays open at the consumer's limit of unacknowledged
messages. The wait is divided into slices, because a request is lost with its connection.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections import OrderedDict, deque
from contextlib import suppress

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from rlhfspec.errors import InvalidRequest, TransportClosed
from rlhfspec.messages.transport.base import Message, SeenMessage
from rlhfspec.messages.transport.jetstream.connection import RETRY_SECONDS, Connection, status_of
from rlhfspec.messages.transport.jetstream.deliveries import Consuming, NatsMessage, headers_of, seen
from rlhfspec.messages.transport.jetstream.streams import SECOND, latest_of, stream_name

SLICE_SECONDS = 5.0
_EXPIRY_GRACE_SECONDS = 0.5  # after a request's expiry, to wait for its answer
PULL_BYTES = 32 << 20  # well below the unread bytes at which a subscription drops messages
_UNSUBSCRIBE_SECONDS = 1.0
_CONCURRENT_FETCHES = 64
_ENDED = "ended"  # the connection is gone, or enough has arrived
EMPTY = ("404", "408", _ENDED)


class PullReading:
    """Subscription of one worker; messages that arrive after a cancelled pull go to the next pull."""

    def __init__(self, consuming: Consuming) -> None:
        self._consuming = consuming
        self._connection = consuming.connection
        self._inbox = self._connection.new_inbox()
        self._ready: deque[NatsMessage] = deque()
        self._numbers = itertools.count()
        self._requests: dict[str, tuple[int, asyncio.Future[str]]] = {}  # by number: (messages wanted, status)
        self._heard: Subscription | None = None
        self._closed = False
        self._is_left = False  # closed and drained: messages that still arrive are nak'ed

    async def open(self) -> PullReading:
        self._heard = await self._connection.listen(f"{self._inbox}.*", self._arrived)
        self._connection.disturbed.add(self._end_requests)
        return self

    async def pull(self, max_messages: int, timeout_seconds: float) -> list[Message]:
        clock = self._connection.clock
        end = clock.now() + timeout_seconds
        while True:
            self._refuse_if_closed()
            if taken := self._take(max_messages):
                return taken
            status = await self._ask(max_messages, 0.0)
            if not self._ready and (left := end - clock.now()) > 0 and status in EMPTY:
                status = await self._ask(1, left)
            if not self._ready and clock.now() >= end:
                self._refuse_if_closed()
                return []
            if status not in EMPTY:
                await self._refused(status)

    def _take(self, most: int) -> list[Message]:
        """Take ready messages without awaiting, so that a cancelled pull loses nothing."""
        taken: list[Message] = []
        while self._ready and len(taken) < most:
            message = self._ready.popleft()
            if message.is_held and not message.is_one_too_many():
                message.watch_over()
                taken.append(message)
        return taken

    async def _ask(self, num_messages: int, seconds: float) -> str:
        """Request messages, which arrive in `_ready`, and return the request's final status."""
        if not await self._connection.until_connected(seconds):
            return _ENDED
        seconds = min(seconds, SLICE_SECONDS)
        wanted = {"batch": num_messages, "max_bytes": PULL_BYTES}
        wanted |= {"expires": round(seconds * SECOND)} if seconds > 0 else {"no_wait": True}
        number = str(next(self._numbers))
        ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._requests[number] = num_messages, ended
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream_name(self._consuming.subject)}.{self._consuming.consumer.name}"
        try:
            await self._connection.send(subject, json.dumps(wanted).encode(), reply=f"{self._inbox}.{number}")
            async with asyncio.timeout(seconds + _EXPIRY_GRACE_SECONDS):
                return await ended
        except TimeoutError:
            return _ENDED
        finally:
            del self._requests[number]

    async def _refused(self, status: str) -> None:
        """Raise InvalidRequest if the consumer or stream is gone, else wait before a retry."""
        if status == "503" or "deleted" in status:
            found = await self._connection.api(f"STREAM.INFO.{stream_name(self._consuming.subject)}")
            if "error" in found or "deleted" in status:
                raise InvalidRequest("subject", self._consuming.subject, "was not declared, or is gone")
        await self._connection.clock.sleep(RETRY_SECONDS)

    async def _arrived(self, message: Msg) -> None:
        if message.reply:
            delivered = NatsMessage(self._consuming, message)
            if delivered.is_done:
                self._consuming.start(delivered.ack())
                return
            if self._is_left:
                self._consuming.start(delivered.nak())
                return
            self._ready.append(delivered)
            for wanted, ended in self._requests.values():
                if len(self._ready) >= wanted:
                    _end(ended, _ENDED)
        elif (number := message.subject.rpartition(".")[2]) in self._requests:
            status, said = status_of(message), (message.headers or {}).get("Description", "")
            done = status == "409" and said == "Batch Completed"
            _end(self._requests[number][1], _ENDED if done else f"409 {said}".lower() if status == "409" else status)

    def _end_requests(self) -> None:
        for _, ended in self._requests.values():
            _end(ended, _ENDED)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise TransportClosed(self._consuming.subject)
        self._connection.refuse_if_closed(self._consuming.subject)

    async def close(self) -> None:
        """Close the subscription and nak unread messages, including those in flight."""
        if self._closed:
            return
        self._closed = True
        self._end_requests()
        self._connection.disturbed.discard(self._end_requests)
        if self._heard is None or self._connection.is_closed:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNSUBSCRIBE_SECONDS):
                if self._connection.is_connected:
                    await self._heard.drain()  # type: ignore[no-untyped-call]
                else:
                    await self._heard.unsubscribe()
        self._is_left = True
        with suppress(TimeoutError):
            async with asyncio.timeout(_UNSUBSCRIBE_SECONDS):
                await asyncio.gather(*(message.nak() for message in self._ready))


class WatchReading:
    """Watcher that keeps the newest unread messages."""

    def __init__(self, connection: Connection, subject: str, *, of_state: bool, max_unread: int) -> None:
        self._connection = connection
        self._subject = subject
        self._heard_on = latest_of(subject) if of_state else subject
        self._of_state = of_state
        self._max_unread = max_unread
        self._unread: OrderedDict[str, SeenMessage] = OrderedDict()  # state by key, others by number
        self._numbers: dict[str, int] = {}  # of state: the newest seen of each key
        self._num_arrived = 0
        self._read_at = -1  # reconnect count at the last read of the latest values
        self._woken = asyncio.Event()
        self._heard: Subscription | None = None
        self._closed = False

    async def open(self) -> WatchReading:
        self._heard = await self._connection.listen(self._heard_on, self._arrived)
        self._connection.disturbed.add(self._woken.set)
        await self._read_latest()
        self._refuse_if_closed()
        return self

    async def pull(self, max_messages: int, timeout_seconds: float) -> list[Message]:
        clock = self._connection.clock
        end = clock.now() + timeout_seconds
        while True:
            self._refuse_if_closed()
            await self._read_latest()
            if self._unread or clock.now() >= end:
                return [self._unread.popitem(last=False)[1] for _ in range(min(max_messages, len(self._unread)))]
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(end - clock.now()):
                    await self._woken.wait()

    async def _arrived(self, message: Msg) -> None:
        headers = message.headers or {}
        word = message.subject.rpartition(".")[2]
        self._add(word, int(headers.get("Nats-Sequence", 0)), seen(self._subject, message.data, headers))

    def _add(self, word: str, number: int, message: SeenMessage) -> None:
        self._num_arrived += 1
        if self._of_state:
            if number <= self._numbers.get(word, 0):
                return  # already read among the latest values
            self._numbers[word] = number
            self._unread.pop(word, None)
        self._unread[word if self._of_state else str(self._num_arrived)] = message
        if len(self._unread) > self._max_unread:
            self._unread.popitem(last=False)
        self._woken.set()

    async def _read_latest(self) -> None:
        """Read each key's latest message at start and after each reconnect."""
        num_reconnects = self._connection.num_reconnects
        if self._read_at == num_reconnects:
            return
        stream = stream_name(self._subject)
        info = await self._connection.api(f"STREAM.INFO.{stream}", {"subjects_filter": ">"} if self._of_state else None)
        if "error" in info:
            raise InvalidRequest("subject", self._subject, "was not declared, or is gone")
        subjects = list(info["state"].get("subjects") or {}) if self._of_state else []
        found = []
        for start in range(0, len(subjects), _CONCURRENT_FETCHES):
            asked = [
                self._connection.api(f"STREAM.MSG.GET.{stream}", {"last_by_subj": subject})
                for subject in subjects[start : start + _CONCURRENT_FETCHES]
            ]
            found += [answer["message"] for answer in await asyncio.gather(*asked) if "error" not in answer]
        for each in sorted(found, key=lambda each: int(each["seq"])):
            self._add(each["subject"].rpartition(".")[2], each["seq"], _seen(self._subject, each))
        self._read_at = num_reconnects

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise TransportClosed(self._subject)
        self._connection.refuse("subscription", self._heard_on)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._connection.disturbed.discard(self._woken.set)
        self._woken.set()
        if self._heard is not None and not self._connection.is_closed:
            await self._heard.unsubscribe()


def _end(request: asyncio.Future[str], how: str) -> None:
    if not request.done():
        request.set_result(how)


def _seen(subject: str, stored: dict[str, str]) -> SeenMessage:
    return seen(subject, base64.b64decode(stored.get("data", "")), headers_of(stored.get("hdrs", "")))
