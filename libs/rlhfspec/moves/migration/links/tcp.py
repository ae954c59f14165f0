"""Link over TCP, with mutual TLS if there are credentials."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any

from rlhfspec.errors import LinkError
from rlhfspec.moves.migration.links.base import MOST_LANDED_BYTES, SECONDS, LandingAddress
from rlhfspec.moves.migration.links.frames import (
    Door,
    FrameHeader,
    greet,
    read_exactly,
    read_into,
    refuse_dead,
    send_all,
)
from rlhfspec.moves.migration.links.inbox import Landing


class TcpWay:
    def __init__(self, inbox: Landing, token: str, at: LandingAddress) -> None:
        self._inbox = inbox
        self._seconds = at.seconds
        self.door = open_door(at, token, self._serve)
        self.way: Mapping[str, Any] = {"kind": "tcp", **place_of(self.door, at)}

    def close(self) -> None:
        self.door.close()

    def _serve(self, connection: socket.socket) -> None:
        if not isinstance(connection, ssl.SSLSocket):
            keep_alive(connection, self._seconds)
        while True:
            first = read_exactly(connection, 1, None)  # no deadline between ranges, only within one
            self._receive(connection, first, time.monotonic() + self._seconds)

    def _receive(self, connection: socket.socket, first: bytes, deadline: float) -> None:
        header = FrameHeader.read(connection, first, deadline, most_bytes=self._inbox.most_bytes)
        try:
            buffer = self._inbox.buffer(header.num_bytes, timeout=self._seconds)
        except LinkError as error:
            self._inbox.fail(header.key, error.problem)
            raise
        try:
            read_into(connection, buffer, time.monotonic() + self._seconds)
        except LinkError as error:
            self._inbox.give_back(buffer)
            self._inbox.fail(header.key, f"did not arrive whole: {error.problem}")
            raise
        self._inbox.land(header.key, buffer)


class SocketSending:
    def __init__(
        self, way: Mapping[str, Any], token: str, *, tls: ssl.SSLContext | None = None, seconds: float = SECONDS
    ) -> None:
        self._seconds = seconds
        self._memory = bytearray()
        self._connection = connected(way, tls=tls, seconds=seconds)
        try:
            greet(self._connection, token, timeout=seconds)
        except LinkError:
            self._connection.close()
            raise

    def room(self, num_bytes: int) -> memoryview:
        if num_bytes > MOST_LANDED_BYTES:
            raise LinkError("range", f"has {num_bytes} bytes, more than {MOST_LANDED_BYTES}")
        self._refuse_dead()
        if len(self._memory) < num_bytes:
            self._memory = bytearray(num_bytes)
        return memoryview(self._memory)[:num_bytes]

    def close(self) -> None:
        self._connection.close()
        self._memory = bytearray()

    def _refuse_dead(self) -> None:
        if not isinstance(self._connection, ssl.SSLSocket):
            refuse_dead(self._connection)


class TcpSending(SocketSending):
    def send(self, key: str, num_bytes: int) -> None:
        assert num_bytes <= len(self._memory), "nothing was packed"
        self._refuse_dead()
        parts: list[bytes | memoryview] = [FrameHeader(key, num_bytes).to_bytes(), memoryview(self._memory)[:num_bytes]]
        if isinstance(self._connection, ssl.SSLSocket):
            for part in parts:
                self._send_tls(part)
        else:
            send_all(self._connection, parts, time.monotonic() + self._seconds)

    def _send_tls(self, part: bytes | memoryview) -> None:
        assert isinstance(self._connection, ssl.SSLSocket)
        self._connection.settimeout(self._seconds)
        try:
            self._connection.sendall(part)
        except OSError as error:
            raise LinkError("connection", f"broke ({error.strerror or error})") from error


def open_door(at: LandingAddress, token: str, serve: Callable[[socket.socket], None]) -> Door:
    family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
    try:
        listening = socket.create_server((at.host, at.port), family=family)
    except OSError as error:
        raise LinkError("tcp", f"cannot listen at {at.host}: {error.strerror or error}") from error
    return Door(listening, token, serve, tls=at.tls, seconds=at.seconds)


def place_of(door: Door, at: LandingAddress) -> Mapping[str, Any]:
    return {"host": at.host, "port": door.port, "tls": at.tls is not None}


def connected(way: Mapping[str, Any], *, tls: ssl.SSLContext | None, seconds: float) -> socket.socket:
    if bool(way.get("tls")) != (tls is not None):
        raise LinkError("tcp", "one end has credentials for TLS, the other has none")
    try:
        host, port = str(way["host"]), int(way["port"])
        connection = socket.create_connection((host, port), timeout=seconds)
    except (OSError, LookupError, ValueError, OverflowError) as error:
        raise LinkError("tcp", f"cannot connect to {way.get('host')}:{way.get('port')}: {error}") from error
    keep_alive(connection, seconds)
    if tls is None:
        return connection
    try:
        return tls.wrap_socket(connection, server_hostname=host)
    except OSError as error:
        connection.close()
        raise LinkError("tcp", f"no TLS with {host}:{port}: {error}") from error


def keep_alive(connection: socket.socket, seconds: float) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))
