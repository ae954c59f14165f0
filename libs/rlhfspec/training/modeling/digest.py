"""Hashes of all weights. Equal digests mean equal bits; equal checksums, that no accident changed a bit.

Each tensor's bytes are hashed by themselves, so that threads share them out, and what is hashed at the end are names,
types, shapes and those hashes, in the order of names.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import torch
import xxhash

_MOST_THREADS = 8  # of sha256 each does some 1.7 GB/s: together more than a copy


class Hash(Protocol):
    """As hashlib makes them."""

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
    """By sha256. Where a tensor lies and how does not matter.

    Example:
        >>> weights = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
        >>> digest(weights) == digest({"b": torch.ones(1), "a": torch.zeros(3, 2).T})
        True
        >>> digest(weights) == digest({"a": torch.zeros(3, 2), "b": torch.ones(1)})
        False
    """
    return _hashed(state_dict, SHA256)


def checksum(state_dict: Mapping[str, torch.Tensor]) -> str:
    """The same with xxh3_128: some fifteen times as fast, finds damage as surely, and is no proof against a forger.

    Example:
        >>> checksum({"a": torch.ones(2)}) == checksum({"a": torch.tensor([1.0, 2.0])})
        False
    """
    return _hashed(state_dict, XXH3)


def combined(new: NewHash, tensors: Iterable[HashedTensor]) -> str:
    """Of tensors whose bytes are hashed, in whatever order."""
    total = new()
    for name, dtype, shape, own in sorted(tensors):
        total.update(f"{name}\0{dtype}\0{shape}\0".encode() + own)
    return total.hexdigest()


def hashing_threads() -> ThreadPoolExecutor:
    """As many as pay; they are there once there is something to hash."""
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
