"""Plain twin of a packed gated MLP, and its weights unpacked."""

from __future__ import annotations

from torch import Tensor

from rlhfspec.kernels.cpu.packing import unpack
from rlhfspec.kernels.linear import PackedGatedMLP, PackedLinear, activation_twin, linear_twin


def gated_mlp_twin(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str, arithmetic: str) -> Tensor:
    """Compute x [..., H] with gate, up [I, H] and down [N, I] (fp32 holding stored values) -> [..., N]; no biases."""
    hidden = activation_twin(linear_twin(x, gate, None, arithmetic), activation) * linear_twin(x, up, None, arithmetic)
    return linear_twin(hidden, down, None, arithmetic)


def unpacked_weight(layer: PackedLinear) -> Tensor:
    if layer.arithmetic == "torch":
        return layer.packed.to(layer.dtype)
    return unpack(layer.packed, layer.in_features, layer.arithmetic)[: layer.out_features].contiguous()


def unpacked_weights(mlp: PackedGatedMLP) -> tuple[Tensor, Tensor, Tensor]:
    """Return gate, up [I, H] and down [N, I] in the stored dtype."""
    down = unpacked_weight(mlp.down)
    if mlp.arithmetic == "torch":
        return mlp.gate_up[0].to(mlp.dtype), mlp.gate_up[1].to(mlp.dtype), down
    groups = unpack(mlp.gate_up, mlp.hidden_features, mlp.arithmetic).reshape(-1, 2, 16, mlp.hidden_features)
    gate, up = (groups[:, i].reshape(-1, mlp.hidden_features)[: mlp.intermediate_features] for i in (0, 1))
    return gate.contiguous(), up.contiguous(), down
