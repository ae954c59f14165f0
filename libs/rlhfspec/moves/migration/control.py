"""Control channel to a generator, for moves and calls: direct calls in one process, otherwise frames over TCP.

A frame is length (u32), request number (u32), kind (u8) and content. Replies come in any order.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable, Collection
from itertools import count

from rlhfspec.errors import RLHFSpecError
from rlhfspec.moves.migration.base import TELL_SECONDS, NoReply, Peer
from rlhfspec.moves.migration.links.tcp import keep_alive

log = logging.getLogger(__name__)
QUESTION, REPLY, REFUSED = range(3)
HEADER = struct.Struct("!IIB")
MOST_FRAME_BYTES = 64 << 20  # of a frame's content
MOST_BYTES_OF_OTHERS = 1 << 16  # limit for a question that will be refused anyway
MOST_QUESTIONS = 64  # answered at once
MOST_CONNECTIONS = 256
FRAME_SECONDS = 10.0  # for a begun frame, a handshake, and a connection's first frame
_IDLE_CONNECTION_SECONDS = 600.0
Answer = Callable[[bytes], Awaitable[bytes]]


class DirectControl:
    def __init__(self) -> None:
        self._answers: dict[str, Answer] = {}

    def serve(self, address: str, answer: Answer) -> None:
        self._answers[address] = answer

    async def ask(self, peer: Peer, message: bytes, *, timeout: float = TELL_SECONDS) -> bytes:
        answer = self._answers.get(peer.address)
        if answer is None:
            raise NoReply(peer.address, "no process there")
        working = asyncio.ensure_future(answer(message))  # goes on after the asker's timeout, as a server does
        try:
            return await asyncio.wait_for(asyncio.shield(working), timeout)
        except TimeoutError:
            working.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise NoReply(peer.address, f"no reply for {timeout:g} s") from None


class _Frames(asyncio.Protocol):
    """End of a connection that is closed after a frame of more than `most_bytes`."""

    most_bytes = MOST_FRAME_BYTES
    transport: asyncio.Transport

    def __init__(self) -> None:
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, kind: int, number: int, content: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(HEADER.pack(len(content), number, kind) + content)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while len(buffer) >= HEADER.size and not self.transport.is_closing():
            length, number, kind = HEADER.unpack_from(buffer)
            if length > self.most_bytes:
                self.nonsense(f"a frame of {length} bytes")
                return
            end = HEADER.size + length
            if len(buffer) < end:
                return
            content = bytes(memoryview(buffer)[HEADER.size : end])
            del buffer[:end]
            self.came(kind, number, content)

    def came(self, kind: int, number: int, content: bytes) -> None:
        raise NotImplementedError

    def nonsense(self, problem: str) -> None:
        raise NotImplementedError


class StreamControl:
    """Client with one connection per peer, whose certificate name must be in `answerers` (None: any)."""

    def __init__(self, tls: ssl.SSLContext | None = None, *, answerers: Collection[str] | None = None) -> None:
        self._tls = tls
        self._answerers = answerers
        self._lines: dict[str, asyncio.Task[_Line]] = {}

    async def ask(self, peer: Peer, message: bytes, *, timeout: float = TELL_SECONDS) -> bytes:
        if len(message) > MOST_FRAME_BYTES:
            raise NoReply(peer.address, f"a question of {len(message)} bytes")
        try:
            async with asyncio.timeout(timeout):
                line = await self._line(peer.address)
                kind, content = await line.ask(message)
        except TimeoutError:
            raise NoReply(peer.address, f"no reply for {timeout:g} s") from None
        except (OSError, ValueError, OverflowError) as error:  # ValueError and OverflowError: an invalid address
            raise NoReply(peer.address, str(error) or type(error).__name__) from None
        if kind != REPLY:
            raise NoReply(peer.address, content.decode(errors="replace")[:500])
        return content

    def close(self) -> None:
        for task in self._lines.values():
            _close(task)
        self._lines.clear()

    async def _line(self, address: str) -> _Line:
        """Return the connection to an address, opened if necessary."""
        task = self._lines.pop(address, None)
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().is_lost)):
            task = asyncio.create_task(self._open(address))
        self._lines[address] = task
        if len(self._lines) > MOST_CONNECTIONS:
            _close(self._lines.pop(next(iter(self._lines))))
        return await asyncio.shield(task)

    async def _open(self, address: str) -> _Line:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        loop = asyncio.get_running_loop()
        name = host if self._tls else None
        async with asyncio.timeout(FRAME_SECONDS):
            _, line = await loop.create_connection(_Line, host, int(port), ssl=self._tls, server_hostname=name)
        answerer = _common_name(line.transport)
        if self._answerers is not None and answerer not in self._answerers:
            line.transport.abort()
            raise ConnectionRefusedError(f"{answerer or 'an unknown peer'} may not receive sequences")
        keep_alive(line.transport.get_extra_info("socket"), FRAME_SECONDS)
        return line


def _close(opening: asyncio.Task[_Line]) -> None:
    if not opening.done():
        opening.cancel()
    elif not opening.cancelled() and opening.exception() is None:
        opening.result().transport.abort()


class _Line(_Frames):
    def __init__(self) -> None:
        super().__init__()
        self.is_lost = False
        self._numbers = count(1)
        self._asked: dict[int, asyncio.Future[tuple[int, bytes]]] = {}

    async def ask(self, message: bytes) -> tuple[int, bytes]:
        if self.is_lost or self.transport.is_closing():
            raise ConnectionResetError("the connection is lost")
        number = next(self._numbers) & 0xFFFFFFFF
        future: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        self.send(QUESTION, number, message)
        try:
            return await future
        finally:
            self._asked.pop(number, None)

    def came(self, kind: int, number: int, content: bytes) -> None:
        future = self._asked.get(number)
        if future is not None and not future.done():  # else its asker timed out
            future.set_result((kind, content))

    def nonsense(self, problem: str) -> None:
        log.warning("an invalid reply about a move: %s", problem)
        self.transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        for future in self._asked.values():
            if not future.done():
                future.set_exception(error if isinstance(error, OSError) else ConnectionResetError("it hung up"))


class StreamControlServer:
    """Server of requests from certificate names in `askers` (None: any); create it in the event loop."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        tls: ssl.SSLContext | None = None,
        askers: Collection[str] | None = None,
        frame_seconds: float = FRAME_SECONDS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family)
        self._listening.setblocking(False)
        self.address = f"{host}:{self._listening.getsockname()[1]}"
        self.askers = askers
        self.frame_seconds = frame_seconds
        self._tls = tls
        self._answers: dict[str, Answer] = {}  # by role; "": of all askers without one of their own
        self._open: set[_ServedConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self.num_questions = 0

    def serve(self, answer: Answer, *, role: str = "") -> None:
        """Accept requests and reply with `answer`, only to `role` if given; callable from any thread."""
        self._loop.call_soon_threadsafe(self._serve, answer, role)

    def close(self) -> None:
        """Close every connection; call it in the event loop."""
        if self._accepting is not None:
            self._accepting.cancel()
        self._listening.close()
        for each in list(self._open):
            each.end()

    def refuse(self, problem: str) -> None:
        log.warning("a request about a move is refused: %s", problem)

    def left(self, connection: _ServedConnection) -> None:
        self._open.discard(connection)

    def ask(self, asker: _ServedConnection, number: int, content: bytes) -> None:
        if self.num_questions >= MOST_QUESTIONS:
            self.refuse("too many requests at once")
            asker.send(REFUSED, number, b"too many questions at once")
            return
        self.num_questions += 1
        self._begin(self._answered(asker, number, content))

    async def _answered(self, asker: _ServedConnection, number: int, content: bytes) -> None:
        """Reply to a request, even if the client has disconnected."""
        kind, said = REFUSED, b"no answer could be made"
        try:
            answer = self._answers.get(asker.role) or self._answers.get("")
            if answer is None:
                raise NoReply(self.address, f"there is nothing for {asker.role} here")
            said = await answer(content)
            kind = REPLY
        except RLHFSpecError as error:
            self.refuse(str(error))
            said = str(error).encode()
        finally:
            self.num_questions -= 1
            asker.send(kind, number, said)

    def _serve(self, answer: Answer, role: str) -> None:
        if self._listening.fileno() < 0:
            return  # closed meanwhile
        self._answers[role] = answer
        if self._accepting is None:
            self._accepting = self._begin(self._accept())

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listening)
            except OSError as error:
                log.warning("cannot accept a connection for moves: %s", error)
                await asyncio.sleep(1.0)
                continue
            if len(self._open) >= MOST_CONNECTIONS:
                self.refuse("too many connections")
                connection.close()
                continue
            asked = _ServedConnection(self)
            self._open.add(asked)
            self._begin(self._welcome(connection, asked))

    async def _welcome(self, connection: socket.socket, asked: _ServedConnection) -> None:
        patience = self.frame_seconds if self._tls else None
        try:
            keep_alive(connection, FRAME_SECONDS)
            await self._loop.connect_accepted_socket(
                lambda: asked, connection, ssl=self._tls, ssl_handshake_timeout=patience
            )
        except OSError as error:  # TLS: no certificate, an unknown authority, or a late handshake
            self._open.discard(asked)
            connection.close()
            self.refuse(str(error) or type(error).__name__)

    def _begin(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class _ServedConnection(_Frames):
    """Server's end of a connection. A frame must end by a deadline; unread replies pause reading."""

    def __init__(self, server: StreamControlServer) -> None:
        super().__init__()
        self._server = server
        self.role = ""  # in its certificate
        self._may_not = ""
        self._due = 0.0
        self._watching: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.role, askers = _common_name(transport), self._server.askers
        if askers is not None and self.role not in askers:
            self._may_not = f"{self.role or 'an unknown peer'} may not move sequences"
            self.most_bytes = MOST_BYTES_OF_OTHERS
        self._due = _now() + self._server.frame_seconds
        self._watch()

    def data_received(self, data: bytes) -> None:
        had = len(self._buffer)
        super().data_received(data)
        if not self._buffer:
            self._due = _now() + _IDLE_CONNECTION_SECONDS
        elif len(self._buffer) < had + len(data) or not had:  # another frame has begun
            self._due = _now() + self._server.frame_seconds

    def came(self, kind: int, number: int, content: bytes) -> None:
        if kind != QUESTION:
            self.nonsense(f"a frame of kind {kind}")
        elif self._may_not:
            self._server.refuse(self._may_not)
            self.send(REFUSED, number, self._may_not.encode())
        else:
            self._server.ask(self, number, content)

    def nonsense(self, problem: str) -> None:
        self._server.refuse(problem)
        self.send(REFUSED, 0, problem.encode())
        self.transport.close()

    def pause_writing(self) -> None:
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        self.transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._server.left(self)
        if self._watching is not None:
            self._watching.cancel()

    def end(self) -> None:
        if self._watching is not None:  # else the handshake is not done, and times out by itself
            self.transport.abort()

    def _watch(self) -> None:
        wait = self._due - _now()
        if wait <= 0:
            self._server.refuse("no complete frame in time")
            self.transport.abort()
            return
        wait = min(wait, self._server.frame_seconds)
        self._watching = asyncio.get_running_loop().call_later(wait, self._watch)


def _common_name(transport: asyncio.BaseTransport) -> str:
    certificate = transport.get_extra_info("peercert") or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    return names[0] if len(names) == 1 else ""


def _now() -> float:
    return asyncio.get_running_loop().time()
