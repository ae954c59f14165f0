"""Layout of packed weights: packing in C++ (csrc/pack.cpp), unpacking in plain torch."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from torch import Tensor

from rlhfspec.kernels.cpu import build

PAD_OUTPUTS = 64  # packed outputs are padded to a multiple of this
STORED = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@functools.cache
def _pack_kernel(suffix: str) -> Any:
    kernel = build.function("pack" + suffix)
    kernel.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_long] * 4 + [ctypes.c_int]
    return kernel


def round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple


def padded_inputs(num_inputs: int, arithmetic: str) -> int:
    return num_inputs if arithmetic == "fma" else round_up(num_inputs, 32)


def empty_packed(num_outputs: int, num_inputs: int, arithmetic: str, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised flat tensor for packed weights, on huge pages if available."""
    padded = round_up(num_outputs, PAD_OUTPUTS) * padded_inputs(num_inputs, arithmetic)
    packed = torch.empty(padded, dtype=dtype)
    huge, advise_huge_pages = 2 << 20, 14
    start = round_up(packed.data_ptr(), huge)
    length = (packed.data_ptr() + packed.nbytes - start) // huge * huge
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), advise_huge_pages)
    return packed


def pack(weight: Tensor, packed: Tensor, arithmetic: str, *, every: int = 1, offset: int = 0) -> None:
    """Pack `weight` [outputs, inputs] into every `every`-th group of 16 outputs of `packed`, from group `offset` on."""
    source = weight.detach().to(packed.dtype).contiguous()
    suffix = f"_{STORED[packed.dtype]}" if arithmetic == "fma" else "_tiles"
    num_outputs, num_inputs = source.shape
    _pack_kernel(suffix)(
        source.data_ptr(), packed.data_ptr(), num_outputs, num_inputs, every, offset, build.num_threads()
    )


def unpack(packed: Tensor, num_inputs: int, arithmetic: str) -> Tensor:
    """Return the weight [padded outputs, num_inputs] in plain torch; padding rows are zero."""
    padded = padded_inputs(num_inputs, arithmetic)
    if arithmetic != "fma":  # [panel of 32, k step, group of 16, pair of k, column, 2] -> [outputs, k]
        tiles = packed.view(-1, padded // 32, 2, 16, 16, 2)
        return tiles.permute(0, 2, 4, 1, 3, 5).reshape(-1, padded)[:, :num_inputs]
    panels = packed.view(-1, num_inputs, 64)
    if packed.dtype is torch.bfloat16:  # columns c and c + 16 of each 32 lie side by side
        panels = panels.view(-1, num_inputs, 2, 16, 2).transpose(3, 4).reshape(-1, num_inputs, 64)
    return panels.transpose(1, 2).reshape(-1, num_inputs)
