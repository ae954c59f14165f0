"""The versions that a process has, or is about to have, as packed bytes; others read them while they still arrive."""

from __future__ import annotations

import threading
from typing import Literal

from torch import Tensor

from rlhfspec.messages.records import Role, Weights
from rlhfspec.training.weights.base import StateDict, refuse_other, retired
from rlhfspec.training.weights.buffers import Buffers
from rlhfspec.training.weights.fanout import Fanout
from rlhfspec.training.weights.packed import GrowingDigest, PackedWeights, WeightsHeader, pack

Key = tuple[str, Role, int]  # job, role, version
State = Literal["arriving", "whole", "lost"]


class Version:
    """One version: expected, then arriving from its first byte to its last, then whole; or lost."""

    def __init__(self, key: Key, buffers: Buffers) -> None:
        self.key = key
        self._buffers = buffers
        self.fanout: Fanout | None = None  # of what was put here
        self.packed: PackedWeights | None = None
        self.num_bytes = 0  # that are there
        self.state: State = "arriving"
        self._changed = threading.Condition()
        self._digest: GrowingDigest | None = None

    def put(self, state_dict: StateDict) -> PackedWeights:
        self.packed = pack(*self.key, state_dict, self._buffers)
        self.num_bytes, self.state, self.fanout = self.packed.header.num_bytes, "whole", Fanout()
        return self.packed

    def begin(self, header: WeightsHeader) -> Tensor:
        """Where its bytes belong."""
        packed = PackedWeights(header, self._buffers.take(header.num_bytes))
        digest = GrowingDigest(packed)
        with self._changed:
            self.packed, self._digest = packed, digest
            self._changed.notify_all()
        return packed.buffer

    def add(self, piece: bytes) -> None:
        assert self.packed is not None
        self.packed.memory[self.num_bytes : self.num_bytes + len(piece)] = piece
        self.came(len(piece))

    def came(self, num_bytes: int) -> None:
        """So many more are in their place. Others may have them before they are hashed: each hashes for itself."""
        assert self._digest is not None
        with self._changed:
            self.num_bytes += num_bytes
            self._changed.notify_all()
        self._digest.advance(self.num_bytes)

    def tensors(self, record: Weights) -> dict[str, Tensor]:
        """Of a whole version; StorageError when it is not the record's."""
        assert self.packed is not None
        refuse_other(record.uri, self.packed.header.digest, record)
        return self.packed.tensors()

    @property
    def is_complete(self) -> bool:
        return self.packed is not None and self.num_bytes == self.packed.header.num_bytes

    def finish(self) -> bool:
        """Whether its bytes are those that the header promised."""
        assert self.packed is not None
        assert self._digest is not None
        self._digest.advance(self.num_bytes)
        is_right = self._digest.hexdigest() == self.packed.header.digest
        self._end("whole" if is_right else "lost")
        return is_right

    def lose(self) -> None:
        """What is not whole by now will never be."""
        if self.state != "whole":
            self._end("lost")

    def _end(self, state: State) -> None:
        with self._changed:
            self.state = state
            self._changed.notify_all()

    def wait(self, timeout_seconds: float, *, after: int) -> None:
        """Until more than `after` bytes are there, or nothing more will come; -1 waits for the header, and a number
        beyond its size for the end."""

        def more() -> bool:
            return self.state != "arriving" or (self.packed is not None and self.num_bytes > after)

        with self._changed:
            self._changed.wait_for(more, timeout_seconds)

    def ended(self, timeout_seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.state != "arriving", timeout_seconds)


class KeptVersions:
    """The newest `keep` of each job's role, and those that are expected."""

    def __init__(self, keep: int) -> None:
        assert keep >= 1
        self._keep = keep
        self._lock = threading.Lock()
        self._buffers = Buffers()
        self._versions: dict[Key, Version] = {}

    def find(self, key: Key) -> Version | None:
        with self._lock:
            return self._versions.get(key)

    def newest(self, job: str, role: Role) -> int:
        with self._lock:
            return max(self._whole(job, role), default=0)

    def put(self, key: Key, state_dict: StateDict) -> PackedWeights:
        with self._lock:
            self._make_room(key)
        version = Version(key, self._buffers)
        packed = version.put(state_dict)
        with self._lock:
            self._versions[key] = version
            self._make_room(key, arrived=True)
        return packed

    def expect(self, key: Key) -> tuple[Version, bool]:
        """Whether the caller is the one who has to fetch it."""
        with self._lock:
            found = self._versions.get(key)
            if found is not None and found.state != "lost":
                return found, False
            self._make_room(key)
            self._versions[key] = Version(key, self._buffers)
            return self._versions[key], True

    def expect_anew(self, key: Key) -> Version:
        """Instead of one that was lost, or is handed out again."""
        with self._lock:
            self._make_room(key)
            self._versions[key] = Version(key, self._buffers)
            return self._versions[key]

    def arrived(self, version: Version) -> None:
        """Whole; or lost, and then forgotten."""
        with self._lock:
            if version.state == "whole":
                self._make_room(version.key, arrived=True)
            elif self._versions.get(version.key) is version:
                del self._versions[version.key]

    def _whole(self, job: str, role: Role) -> list[int]:
        return [
            key[2] for key, version in self._versions.items() if key[:2] == (job, role) and version.state == "whole"
        ]

    def _make_room(self, key: Key, *, arrived: bool = False) -> None:
        """Before a version comes, so that it can have the memory of the one that goes; and after it has come."""
        job, role, coming = key
        for old in retired({*self._whole(job, role), coming}, self._keep):
            if arrived or old != coming:
                del self._versions[job, role, old]
