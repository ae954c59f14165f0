"""Hashes of weights. Equal digests mean equal bits; checksums detect only accidental damage."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
import xxhash

_MOST_THREADS = 8  # eight sha256 threads outrun a copy


class Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


NewHash = Callable[[], Hash]
SHA256: NewHash = hashlib.sha256
XXH3: NewHash = xxhash.xxh3_128


class HashedTensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    own: bytes  # the hash of its bytes

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor, own: bytes) -> HashedTensor:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), own)


def digest(state_dict: Mapping[str, torch.Tensor]) -> str:
    """Return the sha256 of all weights, independent of memory layout."""
    return _hashed(state_dict, SHA256)


def checksum(state_dict: Mapping[str, torch.Tensor]) -> str:
    """Return the xxh3_128 of all weights, faster than `digest` but easy to forge."""
    return _hashed(state_dict, XXH3)


def combined(new: NewHash, tensors: Iterable[HashedTensor]) -> str:
    total = new()
    for name, dtype, shape, own in sorted(tensors):
        total.update(f"{name}\0{dtype}\0{shape}\0".encode() + own)
    return total.hexdigest()


def hashing_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0))), "hashing")


def hash_of(new: NewHash, data: bytes | memoryview) -> bytes:
    total = new()
    total.update(data)
    return total.digest()


def _hashed(state_dict: Mapping[str, torch.Tensor], new: NewHash) -> str:
    def hashed(name: str) -> HashedTensor:
        tensor = state_dict[name].detach().contiguous().cpu()
        return HashedTensor.of(name, tensor, hash_of(new, tensor.reshape(-1).view(torch.uint8).numpy().data))

    with hashing_threads() as threads:
        return combined(new, threads.map(hashed, state_dict))
