"""Checksums of tensors: crc32 on a CPU, elsewhere a weighted sum that detects any change of a single word.

>>> weights = torch.tensor([1.0, 2.0, 3.0])
>>> checksums([weights]) == checksums([weights.clone()])
True
>>> checksums_on_device([weights]) == checksums_on_device([weights.flip(0)])
False
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

_WORDS_AT_A_TIME = 1 << 22  # at a time: 100 MB of intermediate memory
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)  # the golden ratio's odd number, as signed


def checksums(tensors: Sequence[Tensor]) -> list[bytes]:
    """Return the checksum of each tensor; all must be on one device."""
    if all(tensor.is_cpu for tensor in tensors):
        return [zlib.crc32(_bytes(tensor).numpy().data).to_bytes(4, "little") for tensor in tensors]
    return checksums_on_device(tensors)


def checksums_on_device(tensors: Sequence[Tensor]) -> list[bytes]:
    sums = torch.stack([_sum(tensor) for tensor in tensors]).tolist()
    return [int(each).to_bytes(8, "little", signed=True) for each in sums]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _sum(tensor: Tensor) -> Tensor:
    flat = _bytes(tensor)
    words = flat.view({0: torch.int32, 2: torch.int16}.get(len(flat) % 4, torch.uint8))
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), _WORDS_AT_A_TIME):
        part = words[first : first + _WORDS_AT_A_TIME].to(torch.int64)
        place = torch.arange(first + 1, first + 1 + len(part), device=tensor.device).mul_(_SPREAD)
        total += (place.bitwise_xor_(place >> 29).bitwise_or_(1) * part).sum()
    return total
