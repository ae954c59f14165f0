"""Bucket plan of a version, from its header and the number of sending ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor
from torch.distributed.tensor import DTensor

from rlhfspec.huggingface.checksums import checksums
from rlhfspec.messages.records import Role
from rlhfspec.training.modeling.stored import local_of
from rlhfspec.training.weights.packed import ALIGNMENT, DTYPES, TensorPlace, WeightsHeader, described_tensors, end_of

BUCKET_BYTES = 256 << 20
KeptAs = Callable[[str], torch.dtype | None]  # name -> type kept by a receiver, or None if unchanged


class BucketPiece(NamedTuple):
    """Elements [first, last) of one tensor. `at`: byte offset in the bucket; `begin`: byte offset in the version."""

    name: str
    dtype: torch.dtype
    first: int
    last: int
    at: int
    begin: int

    @property
    def num_bytes(self) -> int:
        return (self.last - self.first) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Bucket:
    pieces: tuple[BucketPiece, ...]

    @property
    def num_bytes(self) -> int:
        return self.pieces[-1].at + self.pieces[-1].num_bytes

    @property
    def begin(self) -> int | None:
        """Return the bucket's byte offset in the version, or None if it is not contiguous."""
        first = self.pieces[0].begin
        return first if all(piece.begin - piece.at == first for piece in self.pieces) else None


def described(
    job: str, role: Role, version: int, state_dict: Mapping[str, Tensor], kept_as: KeptAs = lambda _: None
) -> WeightsHeader:
    """Return a version's header without digest. Tensors may be sharded. `kept_as`: type to send by name, or None."""
    local = {name: local_of(tensor) for name, tensor in state_dict.items()}
    stored, same_as = described_tensors(f"{role}/{version}", local)
    tensors = [
        (name, str(kept_as(name) or state_dict[name].dtype).removeprefix("torch."), list(state_dict[name].shape))
        for name, _, _ in stored
    ]
    header = WeightsHeader.model_construct(
        job=job, role=role, version=version, digest="0" * 64, num_bytes=0, tensors=tensors, same_as=same_as
    )
    return header.model_copy(update={"num_bytes": end_of(header.places())})


def buckets(header: WeightsHeader, rank: int, num_ranks: int, most: int = BUCKET_BYTES) -> list[Bucket]:
    """Return a rank's buckets up to `most` bytes, in name order. Tensors' rows are divided among ranks as in FSDP2."""
    found: list[Bucket] = []
    pieces: list[BucketPiece] = []
    at = 0
    for place in header.places():
        dtype = DTYPES[place.dtype]
        first, last = share(place, rank, num_ranks)
        while first < last:
            at = -(-at // ALIGNMENT) * ALIGNMENT
            room = (most - at) // ALIGNMENT * ALIGNMENT // dtype.itemsize
            if room <= 0:
                found.append(Bucket(tuple(pieces)))
                pieces, at = [], 0
                continue
            upto = min(last, first + room)
            pieces.append(BucketPiece(place.name, dtype, first, upto, at, place.begin + first * dtype.itemsize))
            at += pieces[-1].num_bytes
            first = upto
    return [*found, Bucket(tuple(pieces))] if pieces else found


def share(place: TensorPlace, rank: int, num_ranks: int) -> tuple[int, int]:
    """Return a rank's range of a tensor's elements: the first one and the end.

    >>> [share(TensorPlace("a", "int8", (5, 2), 0, 10), rank, 4) for rank in range(4)]
    [(0, 4), (4, 8), (8, 10), (10, 10)]
    """
    rows, size = (place.shape[0], math.prod(place.shape[1:])) if place.shape else (1, 1)
    each = -(-rows // num_ranks)
    return min(rank * each, rows) * size, min((rank + 1) * each, rows) * size


def fill(bucket: Bucket, buffer: Tensor, weights: Mapping[str, Tensor], rank: int, num_ranks: int) -> Tensor:
    for piece in bucket.pieces:
        tensor = weights[piece.name].detach()
        offset = 0
        if isinstance(tensor, DTensor):
            place = TensorPlace(piece.name, "", tuple(tensor.shape), 0, 0)
            offset = share(place, rank, num_ranks)[0]
        flat = local_of(tensor).reshape(-1)[piece.first - offset : piece.last - offset]
        buffer[piece.at : piece.at + piece.num_bytes].view(piece.dtype).copy_(flat)
    return buffer[: bucket.num_bytes]


def bucket_digest(content: Tensor, what: str) -> str:
    """Return the digest of a bucket's bytes and name `what`: xxh3_128, or a checksum on a device."""
    if content.device.type == "cpu":
        found = xxhash.xxh3_128(what.encode())
        found.update(content.numpy().data)
        return found.hexdigest()
    return f"{what}:{checksums([content])[0].hex()}"
