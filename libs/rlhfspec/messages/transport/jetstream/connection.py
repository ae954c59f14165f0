"""Connection to a NATS server that survives server restarts by repeating unanswered requests.

Unlike nats-py, it reports why a first connection failed and handles lost replies, refused subjects and hung sockets.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any, Literal

import nats.errors
from nats.aio.client import PING_PROTO, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from rlhfspec.errors import InvalidRequest, MessageTooLarge, TransportClosed, TransportUnavailable
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.messages.transport.jetstream.greeting import check_info, explained, read_info
from rlhfspec.messages.transport.jetstream.proof import NatsProof

Arrived = Callable[[Msg], Awaitable[None]]
Use = Literal["publish", "subscription"]  # of a subject, in the server's words
ANSWER_SECONDS = 5.0  # then the request is repeated, as its answer may be lost
LAST_ANSWER_SECONDS = 1.0  # for a last try, so that "no answer" does not hide the earlier problem
RETRY_SECONDS = 0.1
HUNG_SECONDS = 0.5
RECONNECT_SECONDS = 2.0  # of one attempt
OUTBOX_BYTES = 64 << 20  # buffer for messages sent while the server is away
_PERMISSION_REFUSED = re.compile(r'permissions violation for (publish|subscription) to "([^"]+)"', re.IGNORECASE)


class Connection:
    """Connection whose requests each wait up to `patience_seconds` for an absent server."""

    def __init__(self, url: str, clock: Clock, patience_seconds: float, role: str = "") -> None:
        self.url = url
        self.clock = clock
        self._patience_seconds = patience_seconds
        self._gives_up_at = math.inf
        self.disturbed: set[Callable[[], None]] = set()  # called when further waiting may be in vain
        self.is_closed = False
        self.num_reconnects = 0
        self._role = role
        self._nc = _Client()
        self._connected = asyncio.Event()
        self._inbox = ""
        self._numbers = itertools.count()
        self._answers: dict[str, tuple[str, asyncio.Future[Msg | None]]] = {}  # by number; None: lost
        self._refused: set[tuple[Use, str]] = set()  # in lower case

    @classmethod
    async def open(
        cls,
        url: str,
        *,
        name: str,
        inbox_prefix: str,
        proof: NatsProof,
        tls: ssl.SSLContext | None,
        clock: Clock,
        patience_seconds: float,
        connect_timeout_seconds: float,
        role: str = "",
    ) -> Connection:
        """Connect, or raise InvalidRequest for a wrong setting, TransportUnavailable without an answer."""
        proof.check()
        connection, opened = cls(url, clock, patience_seconds, role), False
        try:
            async with asyncio.timeout(connect_timeout_seconds):
                check_info(url, await read_info(url), tls)
                await connection._open(name, inbox_prefix, proof, tls, connect_timeout_seconds)
            opened = True
        except TimeoutError:
            raise TransportUnavailable(url, f"no answer within {connect_timeout_seconds:g} s") from None
        finally:
            if not opened:
                await connection._give_up()
        return connection

    async def _open(
        self, name: str, inbox_prefix: str, proof: NatsProof, tls: ssl.SSLContext | None, seconds: float
    ) -> None:
        if tls is not None:
            quiet_about_tls()
        try:
            await self._nc.connect(
                [self.url],
                name=name,
                inbox_prefix=inbox_prefix,
                **proof.options(),
                tls=tls,
                allow_reconnect=False,  # the first attempt must report what is wrong
                max_reconnect_attempts=1,
                reconnect_time_wait=0.25,  # type: ignore[arg-type]
                connect_timeout=seconds,  # type: ignore[arg-type]
                ping_interval=1,
                max_outstanding_pings=2,
                pending_size=OUTBOX_BYTES,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_closed,
            )
        except (nats.errors.Error, OSError) as error:
            raise explained(self.url, error, proof) from error
        self._nc.options.update(allow_reconnect=True, max_reconnect_attempts=-1, connect_timeout=RECONNECT_SECONDS)
        self._connected.set()
        self._inbox = self._nc.new_inbox()
        await self.listen(f"{self._inbox}.*", self._on_answer)

    async def _give_up(self) -> None:
        """Abort the socket, then close, because nats-py would wait for the server."""
        if (socket := _socket_of(self._nc)) is not None:
            socket.abort()
        if self._nc.is_connected:
            await self._nc.close()

    def hurry(self, seconds: float) -> None:
        """Limit all waits for an absent server to `seconds` from now."""
        self._gives_up_at = min(self._gives_up_at, self.clock.now() + seconds)

    def left(self, began: float) -> float:
        """Return the seconds that a call begun at `began` may still wait."""
        return min(began + self._patience_seconds, self._gives_up_at) - self.clock.now()

    async def ask(
        self,
        subject: str,
        data: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        seconds: float = ANSWER_SECONDS,
    ) -> Msg | None:
        """Send a request once; return None if no reply arrives in time, even if the server received it."""
        self.refuse("publish", subject)
        seconds = min(seconds, max(self._gives_up_at - self.clock.now(), LAST_ANSWER_SECONDS))
        number = str(next(self._numbers))
        answer: asyncio.Future[Msg | None] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(seconds):
                await self._connected.wait()
                self._answers[number] = subject.lower(), answer
                await self._publish(subject, data, f"{self._inbox}.{number}", headers)
                message = await answer
        except (TimeoutError, nats.errors.OutboundBufferLimitError):
            message = None
        finally:
            self._answers.pop(number, None)
        self.refuse("publish", subject)
        return message

    async def until_answered(self, subject: str, data: bytes = b"") -> Msg:
        """Repeat an idempotent request until answered, or raise TransportUnavailable."""
        began = self.clock.now()
        while True:
            answer = await self.ask(subject, data)
            if answer is not None and status_of(answer) != "503":
                return answer
            if self.left(began) <= 0:
                seconds = min(self.clock.now() - began, self._patience_seconds)
                raise TransportUnavailable(self.url, f"no answer to {subject} for {seconds:.3g} s")
            await self.clock.sleep(RETRY_SECONDS)

    async def api(self, call: str, body: object = None) -> dict[str, Any]:
        """Call the JetStream API, retrying server errors; client errors such as 404 are in `error`."""
        began = self.clock.now()
        while True:
            answer = await self.until_answered(f"$JS.API.{call}", b"" if body is None else json.dumps(body).encode())
            found: dict[str, Any] = json.loads(answer.data)
            error = found.get("error")
            if error is None or error["code"] < 500:
                return found
            if self.left(began) <= 0:
                raise TransportUnavailable(self.url, f"{call}: {error['description']}")
            await self.clock.sleep(RETRY_SECONDS)

    async def send(
        self, subject: str, data: bytes, *, reply: str = "", headers: Mapping[str, str] | None = None
    ) -> None:
        """Send without confirmation, buffered while the server is away if there is room."""
        self.refuse("publish", subject)
        with suppress(nats.errors.OutboundBufferLimitError):
            await self._publish(subject, data, reply, headers)

    async def _publish(self, subject: str, data: bytes, reply: str, headers: Mapping[str, str] | None) -> None:
        try:
            await self._nc.publish(subject, data, reply=reply, headers=None if headers is None else dict(headers))
        except nats.errors.ConnectionClosedError:
            raise TransportClosed(subject) from None

    def refuse_too_large(self, subject: str, id: str, data: bytes, headers: Mapping[str, str]) -> None:
        """Raise MessageTooLarge for a message over which the server would close the connection."""
        size = len(data) + 16 + sum(len(name.encode()) + len(value.encode()) + 4 for name, value in headers.items())
        if size > self._nc.max_payload:
            raise MessageTooLarge(subject, id, size, self._nc.max_payload)

    async def listen(self, subject: str, arrived: Arrived) -> Subscription:
        """Subscribe, calling `arrived` per message. The subscription is active once any later request is answered."""
        self.refuse("subscription", subject)
        return await self._nc.subscribe(subject, cb=arrived)

    async def until_connected(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._connected.wait()
        return self._connected.is_set()

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    def new_inbox(self) -> str:
        return self._nc.new_inbox()

    def refuse_if_closed(self, subject: str) -> None:
        if self.is_closed:
            raise TransportClosed(subject)

    def refuse(self, use: Use, subject: str) -> None:
        """Raise if the connection is closed, or the server has denied this use of the subject."""
        self.refuse_if_closed(subject)
        if (use, subject.lower()) in self._refused:
            client = f"role {self._role}" if self._role else "this user"
            verb = "publish" if use == "publish" else "subscribe"
            raise InvalidRequest("permission denied", subject, f"{client} may not {verb} to {subject}")

    async def _on_answer(self, message: Msg) -> None:
        _, answer = self._answers.get(message.subject.rpartition(".")[2], ("", None))
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _on_error(self, error: Exception) -> None:
        if found := _PERMISSION_REFUSED.search(str(error)):
            use, subject = found[1].lower(), found[2].lower()
            self._refused.add(("publish" if use == "publish" else "subscription", subject))
            self._lose([answer for asked, answer in self._answers.values() if asked == subject])

    async def _on_disconnected(self) -> None:
        self._connected.clear()
        self._lose([answer for _, answer in self._answers.values()])

    async def _on_reconnected(self) -> None:
        self.num_reconnects += 1
        self._connected.set()
        self._lose([])

    async def _on_closed(self) -> None:
        self.is_closed = True
        self._connected.set()  # wakes the tasks that wait for it
        self._lose([answer for _, answer in self._answers.values()])

    def _lose(self, answers: list[asyncio.Future[Msg | None]]) -> None:
        for answer in answers:
            if not answer.done():
                answer.set_result(None)
        for call in list(self.disturbed):
            call()

    async def close(self) -> None:
        """Close the connection and its socket, even if cancelled."""
        try:
            if self._connected.is_set() and not self.is_closed:
                with suppress(nats.errors.Error):
                    await self._nc.flush(timeout=1)
            self.is_closed = True
            await self._nc.close()
        finally:
            if (socket := _socket_of(self._nc)) is not None:
                socket.abort()


def status_of(message: Msg) -> str:
    """Return the status of an empty reply, such as "404", or ""."""
    return "" if message.reply or not message.headers else message.headers.get("Status", "")


class _Client(Client):
    """Client that, unlike nats-py, sends no credentials when a reconnect lacks TLS."""

    def _connect_command(self) -> bytes:
        socket = _socket_of(self)
        assert socket is not None, "it is connected"
        if self.options.get("tls") is not None and socket.get_extra_info("ssl_object") is None:
            socket.abort()
            raise nats.errors.Error("nats: the server no longer speaks TLS")
        return super()._connect_command()

    async def _process_op_err(self, e: Exception) -> None:
        """Abort a dead socket, because nats-py waits up to 15 minutes for unsent bytes (nats.py #671)."""
        socket = _socket_of(self)
        await super()._process_op_err(e)
        if self.is_reconnecting and socket is not None:
            asyncio.get_running_loop().call_later(HUNG_SECONDS, self._give_up, socket)

    def _give_up(self, socket: asyncio.WriteTransport) -> None:
        if _socket_of(self) is socket:  # otherwise it has reconnected
            with suppress(AttributeError):  # of a TLS socket that is closed already, in Python 3.11
                socket.abort()

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        """Send a ping after all unsent data, because `drain` takes its pong as confirmation."""
        answer: asyncio.Future[bool] = asyncio.Future()
        if future is not None:  # it may be cancelled by then, which nats-py treats as a connection error
            answer.add_done_callback(lambda _: None if future.done() else future.set_result(True))
        self._pongs.append(answer)
        await self._send_command(PING_PROTO)
        await self._flush_pending()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        """Drop unsent data of a lost connection, because nats-py raises AttributeError for it with TLS."""
        if not self.is_connected:
            self._pending, self._pending_data_size = [], 0
        await super()._close(status, do_cbs)


def _socket_of(nc: Client) -> asyncio.WriteTransport | None:
    writer = getattr(nc._transport, "_io_writer", None)
    return None if writer is None else writer.transport


def quiet_about_tls() -> None:
    """Suppress asyncio's warning about TLS connections closed by their peer."""

    def is_news(record: logging.LogRecord) -> bool:
        return "eof_received" not in str(record.msg)

    log = logging.getLogger("asyncio")
    if not any(getattr(each, "__name__", "") == "is_news" for each in log.filters):
        log.addFilter(is_news)
