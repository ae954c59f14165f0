"""Splitting of long attention contexts: one softmax per split, merged in order (docs/law.md)."""

from __future__ import annotations

import torch

SPLIT = 4096  # positions; contexts up to here are one softmax
UNIT = 64  # splits are multiples of this: the largest tile of the Triton kernel


def check_split(split: int) -> None:
    if split < UNIT or split % UNIT:
        raise ValueError(f"split: must be a multiple of {UNIT} (got {split})")


def merge_reference(numbers: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Merge n splits [..., H, n, 2 + D] (largest score, weight sum, sum of values) into outputs [..., H, D]."""
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
