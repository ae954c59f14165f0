"""Inbox of a destination: bytes by key in bounded memory until their reader is done."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from rlhfspec.errors import LinkError
from rlhfspec.moves.migration.links.base import KEPT_SECONDS, LandingAddress, LandingWay, Offer

_REMEMBERED = 1024  # keys that failed or are unwanted
_LEAST_BUFFER = 1 << 16
T = TypeVar("T")


@dataclass(slots=True)
class _Landed:
    view: memoryview
    release: Callable[[], None]
    at: float
    is_taken: bool = False


class Landing:
    """Thread-safe inbox filled by a destination's links; `offer` lets a source connect, and is secret."""

    def __init__(
        self,
        make_ways: Iterable[Callable[[Landing, str, LandingAddress], LandingWay]],
        at: LandingAddress,
        *,
        most_bytes: int,
    ) -> None:
        self.most_bytes = most_bytes
        self._changed = threading.Condition()
        self._landed: dict[str, _Landed] = {}
        self._failed: OrderedDict[str, str] = OrderedDict()
        self._unwanted: OrderedDict[str, None] = OrderedDict()
        self._buffers = _Buffers(most_bytes)
        self._is_closed = False
        token = secrets.token_hex(32)
        self._ways = [make(self, token, at) for make in make_ways]
        self.offer = Offer(token=token, ways=[each.way for each in self._ways]).to_json()

    @property
    def num_bytes(self) -> int:
        return self._buffers.num_used

    @property
    def num_keys(self) -> int:
        return len(self._landed)

    def buffer(self, num_bytes: int, *, timeout: float) -> memoryview:
        """Wait for free memory and reserve it for one range, until `done` after `land`, or `give_back` if unused."""
        if num_bytes > self.most_bytes:
            raise LinkError("range", f"has {num_bytes} bytes, more than {self.most_bytes}")
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._buffers.has(num_bytes):
                self._forget_old()
                if not self._buffers.has(num_bytes):
                    self._wait(deadline, "range", f"no room for {num_bytes} bytes within {timeout:g} s")
            self._refuse_closed()
            return self._buffers.take(num_bytes)

    def give_back(self, buffer: memoryview) -> None:
        with self._changed:
            self._buffers.give(buffer)
            self._changed.notify_all()

    def land(self, key: str, view: memoryview, release: Callable[[], None] | None = None) -> None:
        """Make a received range available; `release` frees its memory (None: from `buffer`)."""
        release = release or (lambda: self.give_back(view))
        with self._changed:
            self._forget_old()
            is_second, is_wanted = key in self._landed, not self._is_closed and key not in self._unwanted
            self._unwanted.pop(key, None)
            if is_wanted and not is_second:
                self._landed[key] = _Landed(view, release, time.monotonic())
                self._changed.notify_all()
                return
        release()
        if is_second:
            raise LinkError(key, "was sent twice")

    def fail(self, key: str, problem: str) -> None:
        """Record that a range will not arrive, so that `take` raises."""
        with self._changed:
            _remember(self._failed, key, problem)
            self._changed.notify_all()

    def has(self, key: str) -> bool:
        return key in self._landed

    def take(self, key: str, num_bytes: int, *, timeout: float) -> memoryview:
        """Wait for a range and return its memory, valid until `done`."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while key not in self._landed:
                if key in self._failed:
                    raise LinkError(key, self._failed.pop(key))
                self._wait(deadline, key, f"did not come within {timeout:g} s")
            landed = self._landed[key]
            if len(landed.view) != num_bytes:
                raise LinkError(key, f"has {len(landed.view)} bytes, not {num_bytes}")
            landed.is_taken = True
            return landed.view

    def done(self, key: str) -> None:
        """Free a range's memory; if it has not arrived, drop it on arrival."""
        with self._changed:
            landed = self._landed.pop(key, None)
            if landed is None and self._failed.pop(key, None) is None and not self._is_closed:
                _remember(self._unwanted, key, None)
        if landed is not None:
            landed.release()

    def close(self) -> None:
        """End every connection and thread; taken ranges must no longer be in use."""
        with self._changed:
            self._is_closed = True
            landed, self._landed = self._landed, {}
            self._changed.notify_all()
        for each in landed.values():
            each.release()
        self._buffers.clear()
        for way in self._ways:  # last, so that nothing waits for room
            way.close()

    def _wait(self, deadline: float, what: str, problem: str) -> None:
        self._refuse_closed()
        if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
            raise LinkError(what, problem)
        self._refuse_closed()

    def _refuse_closed(self) -> None:
        if self._is_closed:
            raise LinkError("landing", "is closed")

    def _forget_old(self) -> None:
        """Drop ranges that were not taken within KEPT_SECONDS."""
        before = time.monotonic() - KEPT_SECONDS
        old = [key for key, each in self._landed.items() if each.at < before and not each.is_taken]
        for key in old:
            self._landed.pop(key).release()


class _Buffers:
    """Reused buffers, because fresh pages cost more than copying into them."""

    def __init__(self, most_bytes: int) -> None:
        self.num_used = 0
        self._most_bytes = most_bytes
        self._free: list[bytearray] = []

    def has(self, num_bytes: int) -> bool:
        return self.num_used + num_bytes <= self._most_bytes

    def take(self, num_bytes: int) -> memoryview:
        self.num_used += num_bytes
        fitting = [each for each in self._free if num_bytes <= len(each) <= 4 * max(num_bytes, _LEAST_BUFFER)]
        if fitting:
            memory = min(fitting, key=len)
            self._free = [each for each in self._free if each is not memory]
        else:
            while self._free and self.num_used + sum(map(len, self._free)) > self._most_bytes:
                self._free.pop(0)
            memory = bytearray(max(_LEAST_BUFFER, 1 << (num_bytes - 1).bit_length()))
        return memoryview(memory)[:num_bytes]

    def give(self, buffer: memoryview) -> None:
        self.num_used -= len(buffer)
        memory = buffer.obj
        assert isinstance(memory, bytearray)
        if sum(map(len, self._free)) + len(memory) <= self._most_bytes // 2:
            self._free.append(memory)

    def clear(self) -> None:
        self._free.clear()


def _remember(remembered: OrderedDict[str, T], key: str, value: T) -> None:
    remembered[key] = value
    if len(remembered) > _REMEMBERED:
        remembered.popitem(last=False)
