"""A version's tensors packed into one buffer in name order, and their header."""

from __future__ import annotations

import math
import mmap
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from rlhfspec.errors import MalformedRecord, StorageError
from rlhfspec.messages.records import Role
from rlhfspec.training.modeling.digest import SHA256, HashedTensor, combined, hash_of, hashing_threads
from rlhfspec.training.modeling.tensor_files import unshared
from rlhfspec.training.weights.base import StateDict
from rlhfspec.training.weights.grpc_messages import WeightsMessage, parse

ALIGNMENT = 64  # bytes: tensors start at multiples, so that they can be viewed in their type
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 200_000  # the largest mixtures of experts have some 100,000
MAX_DIMENSIONS = 16
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "complex64"),
        *("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool"),
    )
}


class WeightsHeader(WeightsMessage):
    """Header before the bytes of a version. Tied tensors are stored once; `same_as` maps the other names to them."""

    schema_version: Literal[1] = 1
    job: str = Field(max_length=253)
    role: Role
    version: int = Field(ge=0)
    digest: str = Field(pattern="^[0-9a-f]{64}$")
    num_bytes: int = Field(ge=0)
    tensors: list[tuple[str, str, list[int]]]  # name, type, shape
    same_as: dict[str, str] = Field(default_factory=dict)

    @classmethod
    def parse(cls, content: bytes, *, max_bytes: int) -> WeightsHeader:
        """Parse and check a header before any allocation. Raise MalformedRecord if it is invalid."""
        try:
            header = parse(cls, content, MAX_HEADER_BYTES)
        except MalformedRecord as error:
            raise _malformed(error.problem) from None
        header._check(max_bytes)
        return header

    def _check(self, max_bytes: int) -> None:
        if len(self.tensors) + len(self.same_as) > MAX_TENSORS:
            raise _malformed(f"{len(self.tensors) + len(self.same_as)} tensors, more than {MAX_TENSORS}")
        for name, dtype, shape in self.tensors:
            if dtype not in DTYPES:
                raise _malformed(f"tensor {name[:80]!r} is of type {dtype[:80]!r}, which is not known")
            if len(shape) > MAX_DIMENSIONS or any(not 0 <= size < 1 << 63 for size in shape):
                raise _malformed(f"tensor {name[:80]!r} has an impossible shape")
        names = [name for name, _, _ in self.tensors]
        if any(first >= second for first, second in pairwise(names)):
            raise _malformed("names must be sorted and unique")
        known = set(names)
        for name, stored in self.same_as.items():
            if name in known or stored not in known or stored >= name:
                raise _malformed(f"tensor {name[:80]!r} cannot be the same as {stored[:80]!r}")
        if (needed := end_of(self.places())) != self.num_bytes:
            raise _malformed(f"its tensors take {needed} bytes, not {self.num_bytes}")
        if needed > max_bytes:
            raise _malformed(f"{needed} bytes of weights, more than the {max_bytes} that are allowed")

    def places(self) -> list[TensorPlace]:
        places, at = [], 0
        for name, dtype, shape in self.tensors:
            begin = -(-at // ALIGNMENT) * ALIGNMENT
            at = begin + math.prod(shape) * DTYPES[dtype].itemsize
            places.append(TensorPlace(name, dtype, tuple(shape), begin, at))
        return places


class TensorPlace(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class PackedWeights:
    header: WeightsHeader
    buffer: Tensor  # uint8 [header.num_bytes]

    def tensors(self) -> dict[str, Tensor]:
        stored = {place.name: _view(self.buffer, place) for place in self.header.places()}
        return stored | {name: stored[same] for name, same in self.header.same_as.items()}

    @property
    def memory(self) -> memoryview:
        return self.buffer.numpy().data


class GrowingDigest:
    """Incremental digest (modeling.digest) of a buffer that is filled from its start."""

    def __init__(self, packed: PackedWeights) -> None:
        self._header = packed.header
        self._places = packed.header.places()
        self._memory = packed.memory
        self._hashes: list[bytes] = []  # of complete tensors
        self._at, self._hash = 0, SHA256()  # of the next one: bytes hashed so far
        self._begin()

    def advance(self, num_bytes: int) -> None:
        while len(self._hashes) < len(self._places):
            place = self._places[len(self._hashes)]
            upto = min(place.end, num_bytes)
            if upto > self._at:
                self._hash.update(self._memory[self._at : upto])
                self._at = upto
            if self._at < place.end:
                return
            self._hashes.append(self._hash.digest())
            self._begin()

    def hexdigest(self) -> str:
        assert len(self._hashes) == len(self._places), "bytes are missing"
        return digest_of(self._header, self._hashes)

    def _begin(self) -> None:
        if len(self._hashes) < len(self._places):
            self._at = self._places[len(self._hashes)].begin
            self._hash = SHA256()


def digest_of(header: WeightsHeader, hashes: Sequence[bytes]) -> str:
    """Return a version's digest (modeling.digest) from its stored tensors' hashes, in order."""
    of_stored = {
        place.name: HashedTensor(place.name, place.dtype, place.shape, own)
        for place, own in zip(header.places(), hashes, strict=True)
    }
    tied = (of_stored[same]._replace(name=name) for name, same in header.same_as.items())
    return combined(SHA256, (*of_stored.values(), *tied))


def described_tensors(what: str, state_dict: StateDict) -> tuple[list[tuple[str, str, list[int]]], dict[str, str]]:
    """Return name, type and shape of stored tensors, and the stored name of each tied one. `what`: for errors."""
    stored, same_as = unshared({name: state_dict[name] for name in sorted(state_dict)})
    found = [(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for name, tensor in stored.items()]
    for name, dtype, _ in found:
        if dtype not in DTYPES:
            raise StorageError(what, f"tensor {name!r} is of type {dtype}, which cannot be sent")
    return found, same_as


def pack(job: str, role: Role, version: int, state_dict: StateDict, buffers: Buffers) -> PackedWeights:
    """Return tensors copied into one of `buffers`, with their header, hashing each in a thread."""
    stored, same_as = described_tensors(f"{role}/{version}", state_dict)
    header = WeightsHeader.model_construct(
        job=job, role=role, version=version, digest="", num_bytes=0, tensors=stored, same_as=same_as
    )
    places = header.places()
    num_bytes = end_of(places)
    packed = PackedWeights(header.model_copy(update={"num_bytes": num_bytes}), buffers.take(num_bytes))
    hashing = []
    with hashing_threads() as threads:
        for place in places:
            _view(packed.buffer, place).copy_(state_dict[place.name].detach())
            hashing.append(threads.submit(hash_of, SHA256, packed.memory[place.begin : place.end]))
    digest = digest_of(packed.header, [each.result() for each in hashing])
    return PackedWeights(packed.header.model_copy(update={"digest": digest}), packed.buffer)


def machine_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def end_of(places: list[TensorPlace]) -> int:
    return places[-1].end if places else 0


def _view(buffer: Tensor, place: TensorPlace) -> Tensor:
    return buffer[place.begin : place.end].view(DTYPES[place.dtype]).reshape(place.shape)


def _malformed(problem: str) -> MalformedRecord:
    return MalformedRecord(f"header of weights: {problem}")


_MINE = 3  # references to unused memory: the list's, the loop's, and getrefcount's own


class Buffers:
    """Pool of buffers, each reused once no tensor views it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> Tensor:
        """Return an uninitialised uint8 tensor [num_bytes]. Free buffers of other sizes are released."""
        size = max(num_bytes, 1)
        with self._lock:
            used: list[mmap.mmap] = []
            free: list[mmap.mmap] = []
            for memory in self._all:
                (free if sys.getrefcount(memory) == _MINE else used).append(memory)
            found = next((memory for memory in free if len(memory) == size), None)
            if found is None:
                found = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._all = [*used, found]
            return torch.frombuffer(found, dtype=torch.uint8)[:num_bytes]
