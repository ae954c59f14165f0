"""Hashes of all weights. Equal digests mean equal bits; equal checksums, that no accident changed a bit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Protocol

import torch
import xxhash


def digest(state_dict: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names in order, each with type, shape and bytes. Where a tensor lies and how does not matter.

    Example:
        >>> weights = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
        >>> digest(weights) == digest({"b": torch.ones(1), "a": torch.zeros(3, 2).T})
        True
        >>> digest(weights) == digest({"a": torch.zeros(3, 2), "b": torch.ones(1)})
        False
    """
    return _hashed(state_dict, hashlib.sha256())[0]


def checksum(state_dict: Mapping[str, torch.Tensor]) -> str:
    """The same with xxh3_128: some fifteen times as fast, finds damage as surely, and is no proof against a forger.

    Example:
        >>> checksum({"a": torch.ones(2)}) == checksum({"a": torch.tensor([1.0, 2.0])})
        False
    """
    return _hashed(state_dict, xxhash.xxh3_128())[0]


def digest_and_checksum(state_dict: Mapping[str, torch.Tensor]) -> tuple[str, str]:
    """Both, while the bytes are at hand.

    Example:
        >>> weights = {"a": torch.ones(2)}
        >>> digest_and_checksum(weights) == (digest(weights), checksum(weights))
        True
    """
    of_digest, of_checksum = _hashed(state_dict, hashlib.sha256(), xxhash.xxh3_128())
    return of_digest, of_checksum


class _Hash(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...
    def hexdigest(self) -> str: ...


def _hashed(state_dict: Mapping[str, torch.Tensor], *totals: _Hash) -> list[str]:
    for name in sorted(state_dict):
        tensor = state_dict[name].detach().contiguous().cpu()
        described = f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0".encode()
        for total in totals:
            total.update(described)
            total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return [total.hexdigest() for total in totals]
