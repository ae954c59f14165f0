"""Link by NIXL over UCX: one-sided reads by RDMA, shared memory or TCP (`UCX_TLS` chooses).

A TCP connection carries token, headers and completions. Without RDMA the source drives progress while it waits. Memory
of a failed transfer is never reused, because bytes may still arrive.
"""

from __future__ import annotations

import importlib
import os
import secrets
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhfspec.errors import InvalidRequest, LinkError
from rlhfspec.moves.migration.links import tcp
from rlhfspec.moves.migration.links.base import MOST_LANDED_BYTES, SECONDS, LandingAddress
from rlhfspec.moves.migration.links.frames import FrameHeader, greet, read_exactly, refuse_dead, send_all
from rlhfspec.moves.migration.links.inbox import Landing

_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")  # the first selects by torch's CUDA version
_AGENT, _RANGE = 0, 1  # kind of frame, in the header's `place`
_MOST_AGENT_BYTES = 1 << 20
_ADDRESS = struct.Struct("!Q")
_DONE = b"+"


def _package() -> ModuleType | None:
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    for name in _PACKAGES:
        with suppress(ImportError):
            return importlib.import_module(name)
    return None


@dataclass(slots=True)
class _Region:
    array: npt.NDArray[np.uint8]
    registered: Any

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


class _Agent:
    def __init__(self, most_bytes: int) -> None:
        if (package := _package()) is None:
            raise InvalidRequest("link", "nixl", "needs the package nixl")
        bindings = importlib.import_module(f"{package.__name__}._bindings")
        self._errors = tuple(e for e in vars(bindings).values() if isinstance(e, type) and issubclass(e, Exception))
        self._most_bytes = most_bytes
        self._all: list[_Region] = []
        self._free: list[_Region] = []
        self._lock = threading.Condition()
        config = package.nixl_agent_config(enable_prog_thread=False)
        self._nixl = package.nixl_agent(f"rlhfspec-{secrets.token_hex(8)}", config)

    def describe(self) -> bytes:
        """Return the agent's metadata, which peers need after every registration."""
        with self._guarded():
            return bytes(self._nixl.get_agent_metadata())

    def meet(self, described: bytes) -> str:
        with self._guarded():
            name = self._nixl.add_remote_agent(described)
            return str(name.decode() if isinstance(name, bytes) else name)

    def part_from(self, name: str) -> None:
        with suppress(LinkError), self._guarded():
            self._nixl.remove_remote_agent(name)

    def help(self) -> None:
        with self._guarded():
            self._nixl.get_new_notifs()

    def read(self, ours: int, theirs: int, num_bytes: int, name: str, deadline: float) -> None:
        if num_bytes == 0:
            return
        with self._guarded():
            here, there = (self._nixl.get_xfer_descs([(each, num_bytes, 0)], "DRAM") for each in (ours, theirs))
            handle = self._nixl.initialize_xfer("READ", here, there, name)
            state = self._nixl.transfer(handle)
        while state == "PROC" and time.monotonic() < deadline:
            os.sched_yield()
            with self._guarded():
                state = self._nixl.check_xfer_state(handle)
        with self._guarded():
            handle.release()
        if state != "DONE":
            raise LinkError("nixl", "the read did not end in time" if state == "PROC" else "the read failed")

    def close(self) -> None:
        with self._lock:
            for region in tuple(self._all):
                with suppress(LinkError):
                    self._drop(region)
            self._nixl = None  # ends its threads and closes its files

    def take(self, num_bytes: int, deadline: float) -> _Region:
        size = max(1 << 16, 1 << (num_bytes - 1).bit_length())
        with self._lock:
            while not (fitting := [each for each in self._free if len(each.array) >= num_bytes]):
                if not self._all or sum(len(each.array) for each in self._all) + size <= self._most_bytes:
                    return self._registered(size)
                if self._free:
                    self._drop(self._free[0])
                elif not self._lock.wait(max(0.0, deadline - time.monotonic())):
                    raise LinkError("range", f"no room for {num_bytes} bytes in time")
            region = min(fitting, key=lambda each: len(each.array))
            self._free = [each for each in self._free if each is not region]
            return region

    def give(self, region: _Region) -> None:
        with self._lock:
            self._free.append(region)
            self._lock.notify_all()

    def _registered(self, size: int) -> _Region:
        array = np.zeros(size, np.uint8)
        with self._guarded():
            registered = self._nixl.register_memory([(array.ctypes.data, size, 0, "")], "DRAM")
        self._all.append(_Region(array, registered))
        return self._all[-1]

    def _drop(self, region: _Region) -> None:
        with self._guarded():
            self._nixl.deregister_memory(region.registered)
        self._free = [each for each in self._free if each is not region]
        self._all = [each for each in self._all if each is not region]

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Hold the lock and turn NIXL's errors into LinkError."""
        with self._lock:
            if self._nixl is None:
                raise LinkError("nixl", "is closed")
            try:
                yield
            except self._errors as error:
                raise LinkError("nixl", str(error) or type(error).__name__) from error


class NixlWay:
    def __init__(self, inbox: Landing, token: str, at: LandingAddress) -> None:
        self._inbox = inbox
        self._seconds = at.seconds
        self._agent = _Agent(inbox.most_bytes)
        self.door = tcp.open_door(at, token, self._serve)
        self.way: Mapping[str, Any] = {"kind": "nixl", **tcp.place_of(self.door, at)}

    def close(self) -> None:
        self.door.close()
        self._agent.close()

    def _serve(self, connection: socket.socket) -> None:
        source = _NixlSource(connection, self._agent, self._inbox, self._seconds)
        try:
            while True:
                first = read_exactly(connection, 1, None)
                source.next(first)
        finally:
            if source.name:
                self._agent.part_from(source.name)


class _NixlSource:
    def __init__(self, connection: socket.socket, agent: _Agent, inbox: Landing, seconds: float) -> None:
        self.name = ""
        self._connection = connection
        self._agent = agent
        self._inbox = inbox
        self._seconds = seconds

    def next(self, first: bytes) -> None:
        deadline = time.monotonic() + self._seconds
        header = FrameHeader.read(self._connection, first, deadline, most_bytes=self._inbox.most_bytes)
        if header.place == _AGENT:
            if header.num_bytes > _MOST_AGENT_BYTES:
                raise LinkError("agent", f"has {header.num_bytes} bytes")
            self.name = self._agent.meet(read_exactly(self._connection, header.num_bytes, deadline))
            return
        try:
            self._receive(header, deadline)
        except LinkError as error:
            self._inbox.fail(header.key, f"did not arrive whole: {error.problem}")
            raise

    def _receive(self, header: FrameHeader, deadline: float) -> None:
        (theirs,) = _ADDRESS.unpack(read_exactly(self._connection, _ADDRESS.size, deadline))
        region = self._agent.take(header.num_bytes, deadline)  # lost if the transfer fails
        self._agent.read(region.address, theirs, header.num_bytes, self.name, deadline)
        view = memoryview(region.array.data)[: header.num_bytes]
        self._inbox.land(header.key, view, lambda: self._agent.give(region))
        send_all(self._connection, [_DONE], deadline)


class NixlSending:
    def __init__(
        self, way: Mapping[str, Any], token: str, *, tls: ssl.SSLContext | None = None, seconds: float = SECONDS
    ) -> None:
        self._seconds = seconds
        self._region: _Region | None = None
        self._connection = tcp.connected(way, tls=tls, seconds=seconds)
        self._agent = _Agent(MOST_LANDED_BYTES)
        try:
            greet(self._connection, token, timeout=seconds)
        except LinkError:
            self.close()
            raise

    def room(self, num_bytes: int) -> memoryview:
        if num_bytes > MOST_LANDED_BYTES:
            raise LinkError("range", f"has {num_bytes} bytes, more than {MOST_LANDED_BYTES}")
        if not isinstance(self._connection, ssl.SSLSocket):
            refuse_dead(self._connection)
        deadline = time.monotonic() + self._seconds
        if self._region is None or len(self._region.array) < num_bytes:
            if self._region is not None:
                self._agent.give(self._region)
            self._region = self._agent.take(num_bytes, deadline)
            described = self._agent.describe()
            send_all(self._connection, [FrameHeader("agent", len(described), _AGENT).to_bytes(), described], deadline)
        return memoryview(self._region.array.data)[:num_bytes]

    def send(self, key: str, num_bytes: int) -> None:
        assert self._region is not None, "nothing was packed"
        deadline, ours = time.monotonic() + self._seconds, self._region.address
        send_all(self._connection, [FrameHeader(key, num_bytes, _RANGE).to_bytes(), _ADDRESS.pack(ours)], deadline)
        _wait_for_done(self._connection, self._agent.help, deadline)

    def close(self) -> None:
        self._connection.close()
        self._region = None
        self._agent.close()


def _wait_for_done(connection: socket.socket, help_on: Callable[[], None], deadline: float) -> None:
    while not select.select([connection], [], [], 0)[0]:
        if time.monotonic() > deadline:
            raise LinkError("connection", "the other end did not confirm the transfer in time")
        help_on()
        os.sched_yield()
    if read_exactly(connection, len(_DONE), deadline) != _DONE:
        raise LinkError("connection", "the other end sent an invalid answer")
