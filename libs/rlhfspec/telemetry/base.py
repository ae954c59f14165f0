"""What looks on at the bus: told of each record that leaves a worker, reaches it and is done with. It changes nothing.

Traces and metrics are made here, so that no stage says a word about them. What a watcher returns from `publishing`
travels with the record, as headers, to the worker that takes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, Protocol

from rlhfspec.messages.records import Record

How = Literal["ack", "nak", "term", "moved"]
SENT = "sent"  # header: when the record was published, in Unix seconds


class WorkerPlace(NamedTuple):
    """A worker."""

    stage: str
    worker: int


class SampleProgress(NamedTuple):
    """How far a sample is when it goes from one worker to another: made by all workers that had it so far."""

    num_moves: int  # before this one
    weights_versions: tuple[int, ...]  # of each token of its response
    num_verifications: int
    num_drafted: int
    num_accepted: int
    strategies: tuple[tuple[str, int], ...]  # as of a `Sample`
    at: float  # Unix seconds: where it leaves, since when it stands still
    seconds: float = 0.0  # of engines

    @property
    def num_tokens(self) -> int:
        return len(self.weights_versions)


class Delivered(NamedTuple):
    """How a record came. `num`: 1 the first time. `progress`: with what it came from another worker of the stage."""

    headers: Mapping[str, str]
    num: int = 1
    progress: SampleProgress | None = None


class Watcher(Protocol):
    def publishing(self, place: WorkerPlace, record: Record) -> Mapping[str, str]:
        """Headers for a record that is about to leave."""
        ...

    def published(self, place: WorkerPlace, record: Record, began: float, is_new: bool) -> None:
        """It is out; it began to leave then (Unix seconds). is_new False: it was there already."""
        ...

    def taken(self, place: WorkerPlace, record: Record, delivered: Delivered) -> None:
        """A worker has pulled it, or has it from another one."""
        ...

    def ended(
        self, place: WorkerPlace, record_type: type, id: str, how: How, progress: SampleProgress | None = None
    ) -> None:
        """The worker is done with what it had taken; `id` is the record's. `progress`: with what it goes elsewhere."""
        ...


class Watchers:
    """Several as one."""

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
    """
    >>> sent_at({"sent": "1716400000.25"}), sent_at({}), sent_at({"sent": "yesterday"}), sent_at({"sent": "inf"})
    (1716400000.25, None, None, None)
    """
    try:
        sent = float(headers[SENT])
    except (KeyError, ValueError):
        return None
    return sent if math.isfinite(sent) else None
