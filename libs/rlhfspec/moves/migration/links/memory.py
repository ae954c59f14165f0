"""Link within one process, which hands over the packed buffer itself."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import Any

from rlhfspec.errors import LinkError
from rlhfspec.moves.migration.links.base import SECONDS, LandingAddress
from rlhfspec.moves.migration.links.inbox import Landing

_inboxes: dict[str, Landing] = {}  # of the landings of this process, by token


class MemoryWay:
    def __init__(self, inbox: Landing, token: str, at: LandingAddress) -> None:
        self._token = token
        _inboxes[token] = inbox
        self.way: Mapping[str, Any] = {"kind": "memory", "process": os.getpid()}

    def close(self) -> None:
        _inboxes.pop(self._token, None)


def is_here(way: Mapping[str, Any], token: str) -> bool:
    return way.get("process") == os.getpid() and token in _inboxes


class MemorySending:
    def __init__(self, way: Mapping[str, Any], token: str, *, seconds: float = SECONDS) -> None:
        if not is_here(way, token):
            raise LinkError("memory", "the receiving end is in another process, or closed")
        self._token = token
        self._inbox = _inboxes[token]
        self._seconds = seconds
        self._room: memoryview | None = None

    def room(self, num_bytes: int) -> memoryview:
        self._give_back()
        if self._token not in _inboxes:
            raise LinkError("memory", "the receiving end is closed")
        self._room = self._inbox.buffer(num_bytes, timeout=self._seconds)
        return self._room

    def send(self, key: str, num_bytes: int) -> None:
        room, self._room = self._room, None
        assert room is not None, "nothing was packed"
        if self._token not in _inboxes:
            raise LinkError("memory", "the receiving end is closed")
        self._inbox.land(key, room[:num_bytes], lambda: self._inbox.give_back(room))

    def close(self) -> None:
        self._give_back()

    def _give_back(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            self._inbox.give_back(room)


def connect(way: Mapping[str, Any], token: str, *, tls: ssl.SSLContext | None, seconds: float) -> MemorySending | None:
    return MemorySending(way, token, seconds=seconds) if is_here(way, token) else None
