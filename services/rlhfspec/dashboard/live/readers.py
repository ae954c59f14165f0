"""Resumable event stream for browsers. Missed *kept* events are resent; of *latest* events only the newest is sent.

>>> async def main() -> list[str]:
...     events = EventStream()
...     events.keep("moves", [1])
...     events.latest("now", {"generators": []})
...     reader = events.reader(lambda: {"steps": []})
...     events.keep("moves", [2])
...     return [reader.queue.get_nowait().name for _ in range(reader.queue.qsize())]
>>> import asyncio; asyncio.run(main())
['whole', 'now', 'moves']
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

MOST_KEPT = 400  # events for returning readers
MOST_UNREAD = 64  # per browser; one more disconnects it


@dataclass(frozen=True, slots=True)
class ServerSentEvent:
    name: str
    data: str  # JSON
    id: str

    def encoded(self) -> bytes:
        return f"id: {self.id}\nevent: {self.name}\ndata: {self.data}\n\n".encode()


@dataclass(slots=True, eq=False)
class Reader:
    queue: asyncio.Queue[ServerSentEvent] = field(default_factory=lambda: asyncio.Queue(MOST_UNREAD))
    is_cut: asyncio.Event = field(default_factory=asyncio.Event)
    hidden: Sequence[str] = ()  # names of events

    def put(self, event: ServerSentEvent) -> None:
        if event.name not in self.hidden:
            self.queue.put_nowait(event)


class EventStream:
    def __init__(self) -> None:
        self.readers: set[Reader] = set()
        self.num_cut = 0
        self._epoch = secrets.token_hex(4)  # numbers of another stream are void
        self._number = 0
        self._kept: deque[tuple[int, ServerSentEvent]] = deque(maxlen=MOST_KEPT)
        self._latest: dict[str, ServerSentEvent] = {}
        self._latest_data: dict[str, str] = {}

    def keep(self, name: str, data: Any) -> None:
        self._number += 1
        event = self._event(name, encoded(data))
        self._kept.append((self._number, event))
        self._send(event)

    def latest(self, name: str, data: Any) -> None:
        text = encoded(data)
        if self._latest_data.get(name) != text:
            self._latest_data[name] = text
            self._latest[name] = event = self._event(name, text)
            self._send(event)

    def anew(self, whole: Callable[[], Any]) -> None:
        """Discard kept events and send the whole state, `whole()`, to all readers."""
        self._number += 1
        self._kept.clear()
        self._send(self._event("whole", encoded(whole())))

    def reader(self, whole: Callable[[], Any], last_id: str = "", hidden: Sequence[str] = ()) -> Reader:
        """Return a reader of the events after `last_id`, which begins with `whole()` if that id is unknown."""
        reader = Reader(hidden=hidden)
        missed = self._missed(last_id)
        if missed is None:
            reader.put(self._event("whole", encoded(whole())))
        for event in (*(missed or ())[-MOST_UNREAD // 2 :], *self._latest.values()):
            reader.put(ServerSentEvent(event.name, event.data, self._id()))
        self.readers.add(reader)
        return reader

    def close(self) -> None:
        for reader in list(self.readers):
            self.leave(reader)

    def leave(self, reader: Reader) -> None:
        reader.is_cut.set()
        self.readers.discard(reader)

    def _missed(self, last_id: str) -> list[ServerSentEvent] | None:
        epoch, _, number = last_id.partition(".")
        if epoch != self._epoch or not (number.isascii() and number.isdecimal()) or len(number) > 18:
            return None
        last = int(number)
        oldest = self._kept[0][0] if self._kept else self._number + 1
        missed = [event for at, event in self._kept if at > last]
        return missed if oldest - 1 <= last <= self._number and len(missed) <= MOST_UNREAD // 2 else None

    def _event(self, name: str, data: str) -> ServerSentEvent:
        return ServerSentEvent(name, data, self._id())

    def _id(self) -> str:
        return f"{self._epoch}.{self._number}"

    def _send(self, event: ServerSentEvent) -> None:
        for reader in list(self.readers):
            try:
                reader.put(event)
            except asyncio.QueueFull:
                self.num_cut += 1
                self.leave(reader)


def encoded(data: Any) -> str:
    """Return one-line JSON. Raise ValueError for NaN and infinity."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False)
