"""Attention in fixed splits at absolute positions, each with its own softmax. Their merge has the bits of one call
anywhere. In the example another process has the second of three splits of one key.

>>> here = Partials(torch.tensor([[[[0.0, 1.0, 3.0]]]]), first=0, split=64)
>>> there = Partials(torch.tensor([[[[0.0, 1.0, 5.0]]]]), first=1, split=64)
>>> nothing_seen = Partials(torch.tensor([[[[-torch.inf, 0.0, 0.0]]]]), first=2, split=64)
>>> merge([here, there, nothing_seen])
tensor([[[4.]]])
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from rlhfspec.kernels.cpu import build

SPLIT = 4096  # positions; contexts up to here are one softmax
UNIT = 64  # splits are multiples of this: the largest tile of the Triton kernel
_MERGE = struct.Struct("@7q")  # mirrors struct MergeCall of csrc/attention_splits.cpp


@dataclass(frozen=True, slots=True)
class Partials:
    """Unmerged partial results of attention rows over the splits [first, first + n)."""

    numbers: torch.Tensor  # [N, H, n, 2 + D] largest score, sum of weights (0: no visible key), weighted sum of values
    first: int
    split: int

    @property
    def stop(self) -> int:
        return self.first + self.numbers.shape[2]


def check_split(split: int) -> None:
    if split < UNIT or split % UNIT:
        raise ValueError(f"split: must be a multiple of {UNIT} (got {split})")


def merge(
    parts: Sequence[Partials],  # from split 0 on, contiguous
    *,
    sinks: torch.Tensor | None = None,  # [H]
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Merge splits into the attention output [N, H, D], with the bits of a single call. dtype: that of the query."""
    _check_parts(parts)
    numbers = parts[0].numbers if len(parts) == 1 else torch.cat([part.numbers for part in parts], dim=2)
    if numbers.is_cuda:
        from rlhfspec.kernels import tree_attention_triton  # lazily: a CPU machine may lack triton

        return tree_attention_triton.merge(numbers, sinks, dtype)
    if numbers.is_cpu and numbers.dtype == torch.float32 and dtype == torch.float32 and build.load() is not None:
        return _native(numbers.contiguous(), sinks)
    return merge_reference(numbers, sinks).to(dtype)


def _check_parts(parts: Sequence[Partials]) -> None:
    if not parts or parts[0].first != 0:
        raise ValueError(f"parts: must begin with split 0 (got {[part.first for part in parts]})")
    for before, after in pairwise(parts):
        if after.first != before.stop:
            raise ValueError(f"parts: split {before.stop} must follow (got {after.first})")
        if after.split != before.split:
            raise ValueError(f"parts: must have splits of one length (got {before.split} and {after.split})")


def merge_reference(numbers: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Merge splits one after the other in plain torch: [..., H, n, 2 + D] -> [..., H, D]."""
    largest, weight_sum, sums = numbers[..., 0, 0], numbers[..., 0, 1], numbers[..., 0, 2:]
    for split in numbers.unbind(-2)[1:]:
        seen = split[..., 1] != 0
        new_largest = torch.maximum(largest, split[..., 0])
        before = torch.where(seen, (largest - new_largest).exp(), 1.0)
        after = torch.where(seen, (split[..., 0] - new_largest).exp(), 0.0)
        largest = new_largest
        weight_sum = weight_sum * before + split[..., 1] * after
        sums = sums * before[..., None] + split[..., 2:] * after[..., None]
    total = weight_sum if sinks is None else weight_sum + (sinks.to(numbers.dtype) - largest).exp()
    return torch.where(weight_sum[..., None] != 0, sums / total[..., None], 0.0)


@functools.cache
def _kernel(isa: str | None = None) -> Any:
    kernel = build.function("merge_partials", isa)
    kernel.argtypes = [ctypes.c_void_p]
    build.check_sizes("attention_splits", _MERGE.size)
    return kernel


def _native(numbers: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    num_rows, num_heads, num_splits, width = numbers.shape
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.empty((num_rows, num_heads, width - 2))
    sinks_at = 0 if sinks is None else sinks.data_ptr()
    call = (numbers.data_ptr(), sinks_at, out.data_ptr(), num_rows, num_heads, num_splits, width - 2)
    _kernel()(_MERGE.pack(*call))
    return out
