"""Link between processes of one host by anonymous files (memfd) mapped on both ends.

Seals forbid shrinking under a reader. Files are reused, because fresh pages are slow.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhfspec.errors import LinkError
from rlhfspec.moves.migration.links.base import MOST_LANDED_BYTES, SECONDS, LandingAddress
from rlhfspec.moves.migration.links.frames import Door, FrameHeader, greet, read_exactly, send_all
from rlhfspec.moves.migration.links.inbox import Landing

_PLACE = struct.Struct("!I")
_LEAST_BYTES = 1 << 16
_MOST_PLACES = 8  # ranges in transit
_SEALS = 0x0001 | 0x0002 | 0x0004  # for F_ADD_SEALS: no other seals, no shrinking, no growing
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034


def this_host() -> str:
    """Return an id of this boot and network namespace, within which memory can be shared."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


class ShmWay:
    def __init__(self, inbox: Landing, token: str, at: LandingAddress) -> None:
        self._inbox = inbox
        self._seconds = at.seconds
        name = f"rlhfspec-link-{secrets.token_hex(8)}"
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(f"\0{name}")
        listening.listen()
        self.door = Door(listening, token, self._serve, seconds=at.seconds)
        self.way: Mapping[str, Any] = {"kind": "shm", "host": this_host(), "name": name}

    def close(self) -> None:
        self.door.close()

    def _serve(self, connection: socket.socket) -> None:
        places: dict[int, mmap.mmap] = {}
        while True:
            connection.settimeout(None)
            first, files, _, _ = socket.recv_fds(connection, 1, 1)
            try:
                self._receive(connection, first, files, places)
            finally:
                for file in files:
                    os.close(file)

    def _receive(self, connection: socket.socket, first: bytes, files: list[int], places: dict[int, mmap.mmap]) -> None:
        if not first:
            raise LinkError("connection", "the other end closed it")
        deadline = time.monotonic() + self._seconds
        header = FrameHeader.read(connection, first, deadline, most_bytes=self._inbox.most_bytes)
        try:
            if files:  # it replaces the file of this number
                places[header.place] = _mapped(files[0], self._inbox.most_bytes)
            if header.place not in places or len(places) > _MOST_PLACES:
                raise LinkError("place", "names no memory that was handed over")
            memory = places[header.place]
            if header.num_bytes > len(memory):
                raise LinkError("place", f"has {len(memory)} bytes, but the range has {header.num_bytes}")
        except LinkError as error:
            self._inbox.fail(header.key, str(error))
            raise
        self._inbox.land(header.key, memoryview(memory)[: header.num_bytes], lambda: _tell(connection, header.place))


class ShmSending:
    def __init__(self, way: Mapping[str, Any], token: str, *, seconds: float = SECONDS) -> None:
        self._seconds = seconds
        self._memory: dict[int, mmap.mmap] = {}
        self._free: set[int] = set()
        self._files: dict[int, int] = {}  # not yet handed over
        self._packing: int | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._connection.settimeout(seconds)
            self._connection.connect(f"\0{way.get('name')}")
            greet(self._connection, token, timeout=seconds)
        except (OSError, ValueError, LinkError) as error:
            self._connection.close()
            raise LinkError("shm", f"cannot connect to {way.get('name')}: {error}") from error

    def is_at_once(self, num_bytes: int) -> bool:
        """Return whether mapped memory is free, so that `send` only writes a header."""
        if select.select([self._connection], [], [], 0.0)[0]:
            heard = self._connection.recv(1024, socket.MSG_PEEK)
            if not heard or len(heard) % _PLACE.size:
                return False
            self._hear(0.0)
        return any(len(self._memory[place]) >= num_bytes for place in self._free)

    def room(self, num_bytes: int) -> memoryview:
        if num_bytes > MOST_LANDED_BYTES:
            raise LinkError("range", f"has {num_bytes} bytes, more than {MOST_LANDED_BYTES}")
        if self._packing is not None:
            self._free.add(self._packing)  # its range was never sent
        self._packing = None
        deadline = time.monotonic() + self._seconds
        self._hear(0.0)
        while (place := self._place_for(num_bytes)) is None:
            if (left := deadline - time.monotonic()) <= 0:
                raise LinkError("shm", f"no room within {self._seconds:g} s: earlier ranges are not done")
            self._hear(left)
        self._free.discard(place)
        self._packing = place
        return memoryview(self._memory[place])[:num_bytes]

    def send(self, key: str, num_bytes: int) -> None:
        place = self._packing
        assert place is not None, "nothing was packed"
        assert num_bytes <= len(self._memory[place]), "more than there was room for"
        header = FrameHeader(key, num_bytes, place).to_bytes()
        deadline = time.monotonic() + self._seconds
        self._hear(0.0)
        if (file := self._files.pop(place, None)) is not None:
            try:
                self._connection.settimeout(self._seconds)
                socket.send_fds(self._connection, [header[:1]], [file])
            except OSError as error:
                raise LinkError("connection", f"broke ({error.strerror or error})") from error
            finally:
                os.close(file)
            header = header[1:]
        send_all(self._connection, [header], deadline)
        self._packing = None

    def close(self) -> None:
        self._connection.close()
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        self._memory.clear()
        self._free.clear()
        self._packing = None

    def _hear(self, seconds: float) -> None:
        while select.select([self._connection], [], [], seconds)[0]:
            seconds = 0.0
            (place,) = _PLACE.unpack(read_exactly(self._connection, _PLACE.size, time.monotonic() + self._seconds))
            if place not in self._memory:
                raise LinkError("connection", "the other end released memory that it was never given")
            self._free.add(place)

    def _place_for(self, num_bytes: int) -> int | None:
        """Return the number of the smallest free file that fits, else of a new one, or None without room."""
        fitting = [place for place in self._free if len(self._memory[place]) >= num_bytes]
        if fitting:
            return min(fitting, key=lambda place: len(self._memory[place]))
        size = max(_LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        busy = sum(len(memory) for place, memory in self._memory.items() if place not in self._free)
        if busy and busy + size > MOST_LANDED_BYTES:
            return None
        unused = set(range(_MOST_PLACES)) - set(self._memory)
        if not unused and not self._free:
            return None
        place = min(self._free or unused)  # replace memory that is too small first
        self._drop(place)
        self._files[place], self._memory[place] = _new(size)
        self._free.add(place)
        return place

    def _drop(self, place: int) -> None:
        self._memory.pop(place, None)
        self._free.discard(place)
        if (file := self._files.pop(place, None)) is not None:
            os.close(file)


def _new(size: int) -> tuple[int, mmap.mmap]:
    file = os.memfd_create("rlhfspec-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, _F_ADD_SEALS, _SEALS)
        return file, mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        os.close(file)
        raise LinkError("shm", f"cannot allocate {size} bytes: {error.strerror}") from error


def _mapped(file: int, most_bytes: int) -> mmap.mmap:
    """Map a file; raise LinkError unless seals forbid shrinking, which would kill its reader."""
    try:
        seals = fcntl.fcntl(file, _F_GET_SEALS)
        size = os.fstat(file).st_size
        if seals & _SEALS != _SEALS or not 0 < size <= 2 * most_bytes:
            raise LinkError("place", "is not shared memory of a link")
        return mmap.mmap(file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    except OSError as error:
        raise LinkError("place", f"cannot be mapped: {error.strerror}") from error


def _tell(connection: socket.socket, place: int) -> None:
    with suppress(OSError):  # the source is gone
        connection.send(_PLACE.pack(place), socket.MSG_DONTWAIT)


def connect(way: Mapping[str, Any], token: str, *, tls: ssl.SSLContext | None, seconds: float) -> ShmSending | None:
    return ShmSending(way, token, seconds=seconds) if way.get("host") == this_host() else None
