"""Plain twin of layers in 8 bits: their weights, and the weights that they should have."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rlhfspec.kernels.int8 import SCALE_GROUP
from rlhfspec.kernels.linear import PackedLinear


def unpacked(layer: PackedLinear) -> Tensor:
    """Return the weights [outputs, inputs] that a layer in 8 bits multiplies with."""
    num_groups = -(-layer.in_features // SCALE_GROUP)
    groups = layer.packed.view(-1, num_groups, 128 + 64 * SCALE_GROUP)
    scales = groups[..., :128].contiguous().view(torch.bfloat16).float()  # [panels, groups, 64]
    numbers = groups[..., 128:].contiguous()
    if layer.arithmetic == "vnni":
        ordered = numbers.view(-1, num_groups, SCALE_GROUP // 4, 64, 4).permute(0, 3, 1, 2, 4).flatten(3).int() - 128
    else:
        ordered = numbers.view(torch.int8).view(-1, num_groups, SCALE_GROUP, 64).permute(0, 3, 1, 2)
    weights = ordered.float() * scales.transpose(1, 2)[..., None]  # [panels, 64, groups, SCALE_GROUP]
    return weights.reshape(-1, num_groups * SCALE_GROUP)[: layer.out_features, : layer.in_features]


def quantised(weight: Tensor) -> Tensor:
    padding = -weight.shape[1] % SCALE_GROUP
    groups = functional.pad(weight.float(), (0, padding)).unflatten(1, (-1, SCALE_GROUP))
    scale = (groups.abs().amax(2, keepdim=True) * (1 / 126.5)).clamp(min=1e-30).bfloat16().float()
    return ((groups * (1 / scale)).round() * scale).flatten(1)[:, : weight.shape[1]]


def activations(layer: PackedLinear, x: Tensor) -> Tensor:
    """Return the activations that a layer in 8 bits multiplies with."""
    if layer.arithmetic != "vnni":
        return x
    groups = functional.pad(x, (0, -x.shape[-1] % 16)).unflatten(-1, (-1, 16))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / scale).round() * scale).flatten(-2)[..., : x.shape[-1]]
