"""Link by gloo sends of torch.distributed, with a TCP connection for token and headers.

Store and gloo authenticate nothing: use trusted networks only.
"""

from __future__ import annotations

import atexit
import itertools
import socket
import ssl
import struct
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from rlhfspec.errors import LinkError
from rlhfspec.moves.migration.links import tcp
from rlhfspec.moves.migration.links.base import SECONDS, LandingAddress
from rlhfspec.moves.migration.links.frames import FrameHeader, read_exactly, send_all
from rlhfspec.moves.migration.links.inbox import Landing

_GROUP_NUMBER = struct.Struct("!I")
_SOURCE, _DESTINATION = 1, 0
_open: weakref.WeakSet[TorchWay] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Close open links, because a thread in gloo at interpreter exit would abort the process."""
    for each in tuple(_open):
        each.close()


class TorchWay:
    def __init__(self, inbox: Landing, token: str, at: LandingAddress) -> None:
        self._inbox = inbox
        self._seconds = at.seconds
        self._numbers = itertools.count()
        with _named():
            self._store: Store | None = TCPStore(
                at.host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=at.seconds)
            )
        self.door = tcp.open_door(at, token, self._serve)
        self.way: Mapping[str, Any] = {"kind": "torch", "store": self._store.port, **tcp.place_of(self.door, at)}
        _open.add(self)

    def close(self) -> None:
        _open.discard(self)
        self.door.close()
        self._store = None

    def _serve(self, connection: socket.socket) -> None:
        store, number = self._store, next(self._numbers)
        assert store is not None
        send_all(connection, [_GROUP_NUMBER.pack(number)], time.monotonic() + self._seconds)
        group = _group(store, number, _DESTINATION, self._seconds)
        while True:
            first = read_exactly(connection, 1, None)
            self._receive(connection, group, first)

    def _receive(self, connection: socket.socket, group: Any, first: bytes) -> None:
        deadline = time.monotonic() + self._seconds
        header = FrameHeader.read(connection, first, deadline, most_bytes=self._inbox.most_bytes)
        try:
            buffer = self._inbox.buffer(header.num_bytes, timeout=self._seconds)
            try:
                with _named():
                    if header.num_bytes:
                        group.recv([torch.frombuffer(buffer, dtype=torch.uint8)], _SOURCE, 0).wait()
            except LinkError:
                self._inbox.give_back(buffer)
                raise
        except LinkError as error:
            self._inbox.fail(header.key, f"did not arrive whole: {error.problem}")
            raise
        self._inbox.land(header.key, buffer)


class TorchSending(tcp.SocketSending):
    def __init__(
        self, way: Mapping[str, Any], token: str, *, tls: ssl.SSLContext | None = None, seconds: float = SECONDS
    ) -> None:
        super().__init__(way, token, tls=tls, seconds=seconds)
        try:
            deadline = time.monotonic() + seconds
            (number,) = _GROUP_NUMBER.unpack(read_exactly(self._connection, _GROUP_NUMBER.size, deadline))
            with _named():
                store = TCPStore(
                    str(way["host"]), int(way["store"]), is_master=False, timeout=timedelta(seconds=seconds)
                )
            self._group: Any = _group(store, number, _SOURCE, seconds)
        except (LinkError, LookupError, ValueError) as error:
            self._connection.close()
            raise error if isinstance(error, LinkError) else LinkError("torch", "the offer names no store") from error

    def send(self, key: str, num_bytes: int) -> None:
        assert self._group is not None, "closed"
        self._refuse_dead()
        send_all(self._connection, [FrameHeader(key, num_bytes).to_bytes()], time.monotonic() + self._seconds)
        with _named():
            if num_bytes:
                packed = torch.frombuffer(self._memory, dtype=torch.uint8, count=num_bytes)
                self._group.send([packed], _DESTINATION, 0).wait()

    def close(self) -> None:
        super().close()
        self._group = None  # joins gloo's threads


def _group(store: Store, number: int, rank: int, seconds: float) -> Any:
    with _named():
        return ProcessGroupGloo(PrefixStore(f"pair-{number}", store), rank, 2, timedelta(seconds=seconds))


@contextmanager
def _named() -> Iterator[None]:
    """Turn the RuntimeErrors of torch.distributed into LinkErrors."""
    try:
        yield
    except RuntimeError as error:
        raise LinkError("torch", str(error).splitlines()[0][:200] if str(error) else type(error).__name__) from error
