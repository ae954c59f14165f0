"""8-bit copies of packed CPU layers (csrc/int8.h).

Activations have 8 bits too, with a scale for every 16, where the CPU multiplies whole numbers (VNNI); else float32.
"""

from __future__ import annotations

import copy
import ctypes
import functools
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.cpu.packing import PAD_OUTPUTS, round_up
from rlhfspec.kernels.linear import Arithmetic, PackedGatedMLP, PackedLinear

SCALE_GROUP = 64  # inputs of an output that share a scale
_LAYOUTS = {torch.float32: 0, torch.bfloat16: 1}
_TILES = 2

PackedLayer = PackedLinear | PackedGatedMLP
_Layer = TypeVar("_Layer", bound=PackedLayer)


@functools.cache
def _quantise_kernel() -> Any:
    kernel = build.function("quantise")
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, *[ctypes.c_long] * 2, *[ctypes.c_int] * 2]
    return kernel


def arithmetic() -> Arithmetic:
    """Return the fastest arithmetic of 8-bit copies on this CPU."""
    return "vnni" if build.best_isa() == "avx512" and build.supports("avx512vnni") else "int8"


def in_8_bits(layer: _Layer) -> _Layer:
    """Return a copy of a layer with 8-bit weights, sharing its biases."""
    copied = copy.copy(layer)
    copied.arithmetic = arithmetic()
    if isinstance(layer, PackedGatedMLP) and isinstance(copied, PackedGatedMLP):
        copied._modules = {}  # a shallow copy would share the dictionary
        copied.down = in_8_bits(layer.down)
        copied.gate_up = _empty(2 * round_up(layer.intermediate_features, PAD_OUTPUTS), layer.hidden_features)
    elif isinstance(layer, PackedLinear) and isinstance(copied, PackedLinear):
        copied.packed = _empty(round_up(layer.out_features, PAD_OUTPUTS), layer.in_features)
    requantise(copied, layer)
    return copied


def requantise(copied: PackedLayer, layer: PackedLayer) -> None:
    """Update a copy after its layer's weights changed."""
    in_fours = copied.arithmetic == "vnni"
    if isinstance(layer, PackedGatedMLP) and isinstance(copied, PackedGatedMLP):
        copied.gate_bias, copied.up_bias = layer.gate_bias, layer.up_bias
        requantise(copied.down, layer.down)
        _quantise(layer.gate_up, copied.gate_up, layer, layer.hidden_features, in_fours)
    elif isinstance(layer, PackedLinear) and isinstance(copied, PackedLinear):
        copied.bias = layer.bias
        _quantise(layer.packed, copied.packed, layer, layer.in_features, in_fours)


def _quantise(packed: Tensor, numbers: Tensor, layer: PackedLayer, num_inputs: int, in_fours: bool) -> None:
    layout = _LAYOUTS[layer.dtype] if layer.arithmetic == "fma" else _TILES
    sizes = numbers.numel() // _bytes_of_output(num_inputs), num_inputs
    _quantise_kernel()(packed.data_ptr(), layout, numbers.data_ptr(), *sizes, in_fours, build.num_threads())


def _empty(num_outputs: int, num_inputs: int) -> Tensor:
    return torch.empty(num_outputs * _bytes_of_output(num_inputs), dtype=torch.uint8)


def _bytes_of_output(num_inputs: int) -> int:
    return round_up(num_inputs, SCALE_GROUP) // SCALE_GROUP * (2 + SCALE_GROUP)
