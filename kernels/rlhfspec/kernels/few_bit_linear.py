"""Linear layers of 4 or 8 bits on a device, for drafts. Sums are float32, and reproducible but not batch-invariant.

32 inputs of an output are a group, which shares a scale; two groups are a block:

    weight = number * scale    # number from -8 to 7, or from -128 to 127; scale = the largest weight / -8 or / -128

A block has 16 words of 4 numbers, or 32 of 2: word i holds inputs i, 16 + i, 32 + i and 48 + i, or i and 32 + i, from
its lowest bits on. Both scales of a block are one word, in bfloat16. Blocks are stored one after another with all their
outputs, so that loads of neighbouring outputs are contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

BLOCK = 64  # inputs
_WORD = 16  # bits
_COUNTERS = 256  # programs that share outputs, at most: more than the multiprocessors of any GPU


def fits(weight: Tensor) -> bool:
    """Return whether a weight [N, K] can be stored in few bits."""
    return weight.shape[1] % BLOCK == 0


def num_bytes(weight: Tensor, bits: int) -> int:
    return weight.numel() // BLOCK * (BLOCK * bits // 8 + torch.int32.itemsize)


class FewBitLinear(nn.Module):
    """Copy of a linear layer in 4 or 8 bits, which shares its bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits = bits
        self.bias = bias
        shape, device = (self.in_features // BLOCK, self.out_features), weight.device
        # Plain attributes, not buffers: they must not be cast or saved like a weight.
        self.numbers = torch.empty((*shape, BLOCK * bits // _WORD), dtype=torch.int16, device=device)
        self.scales = torch.empty(shape, dtype=torch.int32, device=device)
        self.arrived = torch.zeros(_COUNTERS, dtype=torch.int32, device=device)  # programs; zero between two calls
        self.quantise(weight)

    @torch.no_grad()
    def quantise(self, weight: Tensor) -> None:
        """Replace the weight in place, because captured CUDA graphs read it there."""
        if weight.is_cuda:
            from rlhfspec.kernels import few_bit_linear_triton  # lazily: a CPU machine may lack triton

            few_bit_linear_triton.quantise(weight, self.numbers, self.scales)
        else:
            numbers, scales = quantise_reference(weight, self.bits)
            self.numbers.copy_(numbers)
            self.scales.copy_(scales)

    @property
    def weight(self) -> Tensor:
        """Return a meta tensor of the weight's shape, for models that inspect layers."""
        return torch.empty(self.out_features, self.in_features, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if x.is_cuda:
            from rlhfspec.kernels import few_bit_linear_triton

            out = few_bit_linear_triton.product(rows, self.numbers, self.scales, self.bias, self.arrived)
        else:
            out = product_reference(rows, self.numbers, self.scales, self.bias)
        return out.reshape(*x.shape[:-1], self.out_features)


def quantise_reference(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the words [blocks, N, words] and scales [blocks, N] of a weight [N, K]."""
    levels, words = 1 << (bits - 1), BLOCK * bits // _WORD
    groups = weight.float().reshape(len(weight), -1, 2, BLOCK // 2).transpose(0, 1)  # [blocks, N, 2, inputs]
    highest, lowest = groups.amax(-1), groups.amin(-1)
    scales = (torch.where(highest > -lowest, highest, lowest) / -levels).to(torch.bfloat16)
    exact = torch.where(scales[..., None] == 0, 0.0, groups / scales[..., None].float())
    numbers = (exact + 0.5).floor().clamp(-levels, levels - 1).to(torch.int32).reshape(*scales.shape[:2], -1, words)
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32, device=weight.device)[:, None]
    packed = ((numbers & ((1 << bits) - 1)) << shifts).sum(2, dtype=torch.int32)
    halves = scales.view(torch.int16).to(torch.int32)
    return packed.to(torch.int16), (halves[..., 0] & 0xFFFF) | (halves[..., 1] << 16)


def product_reference(rows: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Return rows [n, K] times the weight, plus the bias [N], in the rows' type."""
    bits = numbers.shape[2] * _WORD // BLOCK
    shifts = torch.arange(_WORD - bits, -1, -bits, dtype=torch.int16, device=numbers.device)[:, None]
    whole = (numbers[:, :, None] << shifts) >> (_WORD - bits)  # [blocks, N, numbers of a word, words]
    halves = torch.stack([scales << 16, scales & -65536], -1).view(torch.float32)[..., None]  # [blocks, N, 2, 1]
    weight = (whole.reshape(*scales.shape, 2, -1) * halves).transpose(0, 1).reshape(scales.shape[1], -1)
    return functional.linear(rows.float(), weight, None if bias is None else bias.float()).to(rows.dtype)
