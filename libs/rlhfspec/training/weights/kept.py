"""The packed versions of weights that a process has."""

from __future__ import annotations

import threading

from rlhfspec.messages.records import Role
from rlhfspec.training.weights.base import retired
from rlhfspec.training.weights.buffers import Buffers
from rlhfspec.training.weights.packed import PackedWeights

Key = tuple[str, Role, int]  # job, role, version


class KeptVersions:
    """The newest `keep` versions of each job's role, and the memory that they take turns in."""

    def __init__(self, keep: int) -> None:
        assert keep >= 1
        self.buffers = Buffers()
        self._keep = keep
        self._lock = threading.Lock()
        self._versions: dict[Key, PackedWeights] = {}

    def find(self, key: Key) -> PackedWeights | None:
        with self._lock:
            return self._versions.get(key)

    def newest(self, job: str, role: Role) -> int:
        with self._lock:
            return max(self._numbers(job, role), default=0)

    def make_room(self, key: Key) -> None:
        """Drop the versions that this one will replace, so that it can have their memory."""
        job, role, coming = key
        with self._lock:
            for old in retired({*self._numbers(job, role), coming}, self._keep):
                if old != coming:
                    del self._versions[job, role, old]

    def add(self, key: Key, packed: PackedWeights) -> None:
        job, role, _ = key
        with self._lock:
            self._versions[key] = packed
            for old in retired(self._numbers(job, role), self._keep):
                del self._versions[job, role, old]

    def _numbers(self, job: str, role: Role) -> set[int]:
        return {key[2] for key in self._versions if key[:2] == (job, role)}
