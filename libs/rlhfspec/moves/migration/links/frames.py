"""Socket protocol of links: mutual proof of the offer's token, then one header per range.

    destination -> source: MAGIC, nonce; source -> destination: nonce, proof; destination -> source: proof
    source -> destination, for each range: header, key, and data of the link

A proof is an HMAC of both nonces under the token, which is never sent.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from rlhfspec.errors import LinkError
from rlhfspec.moves.migration.links.base import MOST_KEY_BYTES, SECONDS

MAGIC = b"RLHFKV01"
_LINK_NONCE_BYTES = 16
_PROOF_BYTES = 32
_HEADER = struct.Struct("!4sHIQ")  # mark, length of the key, place (a number of the link), bytes of the range
_MARK = b"KVRG"
CHUNK_BYTES = 1 << 20  # small enough to notice a close
_MOST_CONNECTIONS = 128
_MOST_STRANGERS = 16  # peers that have not yet proved the token
_PAUSE_SECONDS = 0.1  # when no file descriptors are left


class FrameHeader(NamedTuple):
    key: str
    num_bytes: int
    place: int = 0

    def to_bytes(self) -> bytes:
        key = self.key.encode()
        if not 0 < len(key) <= MOST_KEY_BYTES:
            raise LinkError(self.key[:80], f"a key must have 1 to {MOST_KEY_BYTES} bytes")
        return _HEADER.pack(_MARK, len(key), self.place, self.num_bytes) + key

    @classmethod
    def read(cls, connection: socket.socket, first: bytes, deadline: float, *, most_bytes: int) -> FrameHeader:
        """Read a header that begins with `first`; raise LinkError for a range of more than `most_bytes`."""
        fixed = first + read_exactly(connection, _HEADER.size - len(first), deadline)
        mark, length, place, num_bytes = _HEADER.unpack(fixed)
        if mark != _MARK or not 0 < length <= MOST_KEY_BYTES:
            raise LinkError("header", "is not a header of this protocol")
        try:
            name = read_exactly(connection, length, deadline).decode()
        except UnicodeDecodeError:
            raise LinkError("header", "has a key that is not UTF-8 text") from None
        if num_bytes > most_bytes:
            raise LinkError(name, f"has {num_bytes} bytes, more than {most_bytes}")
        return cls(name, num_bytes, place)


def welcome(connection: socket.socket, token: str, *, timeout: float) -> None:
    """Run the destination's handshake, or raise LinkError for an unknown token."""
    deadline = time.monotonic() + timeout
    ours = secrets.token_bytes(_LINK_NONCE_BYTES)
    send_all(connection, [MAGIC + ours], deadline)
    theirs = read_exactly(connection, _LINK_NONCE_BYTES, deadline)
    proof = read_exactly(connection, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(token, b"source", ours, theirs)):
        raise LinkError("greeting", "the other end does not know the token")
    send_all(connection, [_proof(token, b"destination", ours, theirs)], deadline)


def greet(connection: socket.socket, token: str, *, timeout: float) -> None:
    """Run the source's handshake, or raise LinkError for an unknown token."""
    deadline = time.monotonic() + timeout
    if read_exactly(connection, len(MAGIC), deadline) != MAGIC:
        raise LinkError("greeting", "what listens there is not the receiving end of a link")
    theirs, ours = read_exactly(connection, _LINK_NONCE_BYTES, deadline), secrets.token_bytes(_LINK_NONCE_BYTES)
    send_all(connection, [ours + _proof(token, b"source", theirs, ours)], deadline)
    if not hmac.compare_digest(
        read_exactly(connection, _PROOF_BYTES, deadline), _proof(token, b"destination", theirs, ours)
    ):
        raise LinkError("greeting", "the other end does not know the token")


def _proof(token: str, end: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(bytes.fromhex(token), b"\0".join((MAGIC, end, *nonces)), "sha256")


def read_exactly(connection: socket.socket, num_bytes: int, deadline: float | None) -> bytes:
    buffer = bytearray(num_bytes)
    read_into(connection, memoryview(buffer), deadline)
    return bytes(buffer)


def read_into(connection: socket.socket, view: memoryview, deadline: float | None) -> None:
    while view:
        connection.settimeout(_left(deadline))
        try:
            count = connection.recv_into(view[:CHUNK_BYTES])
        except TimeoutError:
            raise LinkError("connection", "the other end stopped in the middle of a message") from None
        except OSError as error:
            raise LinkError("connection", f"broke ({error.strerror or error})") from error
        if count == 0:
            raise LinkError("connection", "the other end closed it")
        view = view[count:]


def send_all(connection: socket.socket, parts: Sequence[bytes | memoryview], deadline: float) -> None:
    views = [memoryview(part) for part in parts if len(part)]
    try:
        while views:
            connection.settimeout(_left(deadline))
            count = connection.sendmsg(views) if len(views) > 1 else connection.send(views[0])
            while views and count >= len(views[0]):
                count -= len(views.pop(0))
            if count:
                views[0] = views[0][count:]
    except TimeoutError:
        raise LinkError("connection", "the other end is not reading") from None
    except OSError as error:
        raise LinkError("connection", f"broke ({error.strerror or error})") from error


def refuse_dead(connection: socket.socket) -> None:
    """Raise LinkError if the peer closed a connection on which it sends nothing."""
    connection.settimeout(0)
    try:
        if connection.recv(1, socket.MSG_PEEK) == b"":
            raise LinkError("connection", "the other end closed it")
    except (BlockingIOError, InterruptedError):
        return
    except OSError as error:
        raise LinkError("connection", f"broke ({error.strerror or error})") from error


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.001, deadline - time.monotonic())


class Door:
    """Server that runs `serve` in a thread per connection; `close` joins them."""

    def __init__(
        self,
        listening: socket.socket,
        token: str,
        serve: Callable[[socket.socket], None],
        *,
        tls: ssl.SSLContext | None = None,
        seconds: float = SECONDS,
    ) -> None:
        self._listening = listening
        self._token = token
        self._serve = serve
        self._tls = tls
        self._seconds = seconds
        self._lock = threading.Lock()
        self._connections: dict[threading.Thread, socket.socket] = {}
        self._strangers: set[threading.Thread] = set()
        self._closed = threading.Event()
        self._accepting = threading.Thread(target=self._accept, name="link door", daemon=True)
        self._accepting.start()

    @property
    def port(self) -> int:
        return int(self._listening.getsockname()[1])

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            threads = [self._accepting, *self._connections]
            for each in (self._listening, *self._connections.values()):
                _shut(each)
        for thread in threads:
            thread.join()
        self._listening.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:  # the peer is gone already, or the door closes
                self._closed.wait(_PAUSE_SECONDS)
                continue
            with self._lock:
                is_full = len(self._connections) >= _MOST_CONNECTIONS or len(self._strangers) >= _MOST_STRANGERS
                if self._closed.is_set() or is_full:
                    connection.close()
                    continue
                thread = threading.Thread(target=self._run, args=(connection,), name="link", daemon=True)
                self._strangers.add(thread)
                self._connections[thread] = connection
                thread.start()

    def _run(self, connection: socket.socket) -> None:
        this = threading.current_thread()
        try:
            connection.settimeout(self._seconds)
            if self._tls is not None:
                with self._lock:  # from here on `close` must shut the wrapped socket
                    connection = self._tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                    self._connections[this] = connection
                connection.do_handshake()
            welcome(connection, self._token, timeout=self._seconds)
            self._strangers.discard(this)
            self._serve(connection)
        except (LinkError, OSError):
            pass  # `serve` has failed the waiting range; the source sees its connection end
        finally:
            with self._lock:
                self._strangers.discard(this)
                self._connections.pop(this, None)
                _shut(connection)
            connection.close()


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # it is no longer connected
        connection.shutdown(socket.SHUT_RDWR)  # wakes threads that wait on it
