"""Weights between ranks that share a process group: rank 0 puts, all others get, together, over the group's own links.

For generators on the ranks that train, or launched beside them by the same torchrun; processes that come and go singly
cannot share a group, and use grpc.py or file.py. The group's backend carries it, gloo or NCCL (through buffers in main
memory).
"""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfspec.errors import MalformedRecord, StorageError, WeightsVersionError
from rlhfspec.messages.records import Role, Weights
from rlhfspec.training.weights.base import StateDict, not_kept, weights_record
from rlhfspec.training.weights.kept import KeptVersions
from rlhfspec.training.weights.packed import MAX_HEADER_BYTES, WeightsHeader, machine_memory

_SCHEME = "broadcast:"
BUCKET_BYTES = 64 << 20


class BroadcastWeightStore:
    """Every rank gets every version that rank 0 puts, in that order: `put` returns when all have it. How long each
    waits for the others is the group's timeout. `device`: where the group's backend takes tensors from."""

    def __init__(
        self, *, keep: int, group: dist.ProcessGroup | None = None, device: str = "cpu", max_bytes: int | None = None
    ) -> None:
        self._group = group
        self._device = device
        self._max_bytes = machine_memory() if max_bytes is None else max_bytes
        self._kept = KeptVersions(keep)
        self._lock = threading.Lock()  # one collective at a time
        self._is_first = dist.get_rank(group) == 0

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        assert self._is_first, "rank 0 puts"
        with self._lock:
            packed = self._kept.put((job, role, version), state_dict)
            uri = f"{_SCHEME}{role}/{version}"
            header = torch.frombuffer(bytearray(packed.header.model_dump_json().encode()), dtype=torch.uint8)
            try:
                self._broadcast(torch.tensor([len(header)]))
                self._broadcast(header)
                self._broadcast(packed.buffer)
            except RuntimeError as error:
                raise StorageError(uri, f"could not be handed to all ranks: {error}") from error
        return weights_record(job, role, version, uri=uri, digest=packed.header.digest)

    def get(self, record: Weights) -> dict[str, Tensor]:
        key = (record.job, record.role, record.version)
        with self._lock:
            while (version := self._kept.find(key)) is None:
                have = self._kept.newest(record.job, record.role)
                if self._is_first or have > record.version:
                    raise not_kept(record, have)
                self._receive(record, have)
        return version.tensors(record)

    def _receive(self, record: Weights, have: int) -> None:
        """The next version that rank 0 puts, whichever it is."""
        try:
            header = self._header()
            version = self._kept.expect_anew((header.job, header.role, header.version))
            try:
                for bucket in torch.split(version.begin(header), BUCKET_BYTES):
                    self._broadcast(bucket)
                    version.came(len(bucket))
                is_right = version.finish()
            finally:
                version.lose()
                self._kept.arrived(version)
        except MalformedRecord as error:
            raise StorageError(record.uri, error.problem) from error
        except RuntimeError as error:
            raise WeightsVersionError(record.version, have, f"rank 0 does not hand it out: {error}") from error
        if not is_right:
            raise StorageError(record.uri, f"the bytes that came are not those of digest {header.digest}")

    def _header(self) -> WeightsHeader:
        size = int(self._broadcast(torch.zeros(1, dtype=torch.int64))[0])
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise MalformedRecord(f"header of weights: {size} bytes")
        content = self._broadcast(torch.empty(size, dtype=torch.uint8)).numpy().tobytes()
        return WeightsHeader.parse(content, max_bytes=self._max_bytes)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        """In buckets, in place."""
        first = 0 if self._group is None else dist.get_global_rank(self._group, 0)
        for bucket in torch.split(tensor, BUCKET_BYTES):
            travelling = bucket.to(self._device)
            dist.broadcast(travelling, src=first, group=self._group)
            if travelling is not bucket:
                bucket.copy_(travelling)
        return tensor
