"""Watchers of the bus, called for each published, taken or ended record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from rlhfspec.messages.records import Record

How = Literal["ack", "nak", "term", "moved"]
SENT = "sent"  # header: time of publication in Unix seconds


class WorkerPlace(NamedTuple):
    stage: str
    worker: int


class SampleProgress(NamedTuple):
    """Progress of a moving sample, summed over its generators."""

    num_moves: int  # before this one
    weights_versions: tuple[int, ...]  # of each response token
    num_verifications: int
    num_drafted: int
    num_accepted: int
    strategies: tuple[tuple[str, int], ...]  # as in `Sample`
    at: float  # Unix seconds when it left its source
    seconds: float = 0.0  # of engine time

    @property
    def num_tokens(self) -> int:
        return len(self.weights_versions)


class Delivered(NamedTuple):
    """Delivery number `num` (from 1) of a record; `progress` is set if it came from another worker."""

    headers: Mapping[str, str]
    num: int = 1
    progress: SampleProgress | None = None


class Watcher(Protocol):
    def publishing(self, place: WorkerPlace, record: Record) -> Mapping[str, str]: ...

    def published(self, place: WorkerPlace, record: Record, began: float, is_new: bool) -> None:
        """Observe a record published since `began` (Unix seconds), a duplicate unless `is_new`."""
        ...

    def taken(self, place: WorkerPlace, record: Record, delivered: Delivered) -> None:
        """Observe a record pulled, or received from another worker."""
        ...

    def ended(
        self, place: WorkerPlace, record_type: type, id: str, how: How, progress: SampleProgress | None = None
    ) -> None:
        """Observe the end of the worker's delivery. `progress` is set if the sample moves elsewhere."""
        ...


class Watchers:
    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = tuple(watchers)

    def publishing(self, place: WorkerPlace, record: Record) -> Mapping[str, str]:
        headers: dict[str, str] = {}
        for watcher in self._watchers:
            headers.update(watcher.publishing(place, record))
        return headers

    def published(self, place: WorkerPlace, record: Record, began: float, is_new: bool) -> None:
        for watcher in self._watchers:
            watcher.published(place, record, began, is_new)

    def taken(self, place: WorkerPlace, record: Record, delivered: Delivered) -> None:
        for watcher in self._watchers:
            watcher.taken(place, record, delivered)

    def ended(
        self, place: WorkerPlace, record_type: type, id: str, how: How, progress: SampleProgress | None = None
    ) -> None:
        for watcher in self._watchers:
            watcher.ended(place, record_type, id, how, progress)


def sent_at(headers: Mapping[str, str]) -> float | None:
    """Return the time of publication in Unix seconds, or None.

    >>> sent_at({"sent": "1716400000.25"}), sent_at({}), sent_at({"sent": "yesterday"}), sent_at({"sent": "inf"})
    (1716400000.25, None, None, None)
    """
    try:
        sent = float(headers[SENT])
    except (KeyError, ValueError):
        return None
    return sent if math.isfinite(sent) else None
