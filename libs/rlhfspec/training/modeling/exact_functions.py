"""Autograd functions that run an engine kernel forward, and backward through its plain-torch twin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rlhfspec.kernels import gumbel
from rlhfspec.kernels.linear import PackedGatedMLP, PackedLinear, activation_twin

_ROUNDING_ARITHMETICS = ("amx", "dpbf16")


def stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Round values to `dtype`, kept in float32. The gradient passes unchanged."""
    return tensor if dtype == torch.float32 else _apply(_StraightThrough, tensor, dtype)


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None, packed: PackedLinear) -> Tensor:
    """Run a linear layer's kernel: x [..., K], weight [N, K] (the values in `packed`) -> [..., N]."""
    return _apply(_ExactLinear, x, weight, bias, packed)


def exact_gated_mlp(
    x: Tensor, matrices: tuple[Tensor, Tensor, Tensor], biases: tuple[Tensor | None, ...], packed: PackedGatedMLP
) -> Tensor:
    """Run a gated MLP's kernel: x [..., H], gate and up [I, H], down [N, I], biases -> [..., N]."""
    return _apply(_GatedMLP, packed, x, *matrices, *biases)


def exact(kernel: Callable[..., Tensor], twin: Callable[..., Tensor], *tensors: Tensor | None) -> Tensor:
    """Return kernel(*tensors) with the gradient of twin(*tensors)."""
    return _apply(_Kernel, kernel, twin, *tensors)


def exact_log_probs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return log_softmax(logits / temperature)[target] with the sampler's bits: [t, V], [t] -> [t]."""
    return _apply(_LogProbs, logits, targets, temperature)


def _apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    return function.apply(*arguments)  # type: ignore[no-untyped-call,no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        return tensor.to(dtype).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def _read(x: Tensor, arithmetic: str) -> Tensor:
    return stored(x, torch.bfloat16 if arithmetic in _ROUNDING_ARITHMETICS else torch.float32)


class _ExactLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, packed: PackedLinear) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.packed = packed
        return packed(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        rows = grad.flatten(0, -2)  # [R, N]
        return (
            grad @ stored(weight, ctx.packed.dtype) if wants_x else None,
            rows.T @ _read(x, ctx.packed.arithmetic).flatten(0, -2) if wants_weight else None,
            rows.sum(0) if wants_bias else None,
            None,
        )


class _GatedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: PackedGatedMLP, x: Tensor, *weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *weights)
        ctx.packed = packed
        return packed(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        packed = ctx.packed
        _, wants_x, wants_gate, wants_up, wants_down, wants_gate_bias, wants_up_bias, wants_down_bias = (
            ctx.needs_input_grad
        )
        x, gate, up, down, gate_bias, up_bias, _ = ctx.saved_tensors
        wanted = (wants_x, wants_gate, wants_up, wants_gate_bias, wants_up_bias)
        leaves = _leaves((x, gate, up, gate_bias, up_bias), wanted)
        with torch.enable_grad():
            hidden = _gated(packed, *leaves)  # [..., I]
        rows = grad.flatten(0, -2)
        read = _read(hidden.detach(), packed.arithmetic).flatten(0, -2)
        grad_x, grad_gate, grad_up, grad_gate_bias, grad_up_bias = _gradients(
            hidden, leaves, grad @ stored(down, packed.dtype)
        )
        grad_down = rows.T @ read if wants_down else None
        grad_down_bias = rows.sum(0) if wants_down_bias else None
        return None, grad_x, grad_gate, grad_up, grad_down, grad_gate_bias, grad_up_bias, grad_down_bias


def _gated(
    packed: PackedGatedMLP, x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None
) -> Tensor:
    read = _read(x, packed.arithmetic)
    gated = functional.linear(read, stored(gate, packed.dtype), _stored_bias(gate_bias, packed))
    raised = functional.linear(read, stored(up, packed.dtype), _stored_bias(up_bias, packed))
    return activation_twin(gated, packed.activation) * raised


def _stored_bias(bias: Tensor | None, packed: PackedGatedMLP) -> Tensor | None:
    return None if bias is None else stored(bias, packed.dtype)


class _Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Tensor], twin: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.twin = twin
        return kernel(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        leaves = _leaves(ctx.saved_tensors, ctx.needs_input_grad[2:])
        with torch.enable_grad():
            result = ctx.twin(*leaves)
        return (None, None, *_gradients(result, leaves, grad))


def _leaves(tensors: tuple[Any, ...], wanted: tuple[bool, ...]) -> list[Any]:
    return [
        tensor.detach().requires_grad_(wants) if isinstance(tensor, Tensor) else tensor
        for tensor, wants in zip(tensors, wanted, strict=True)
    ]


def _gradients(result: Tensor, leaves: list[Any], grad: Tensor) -> list[Tensor | None]:
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    found = iter(torch.autograd.grad(result, wanted, grad) if wanted else ())
    return [next(found) if isinstance(leaf, Tensor) and leaf.requires_grad else None for leaf in leaves]


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.temperature = temperature
        return gumbel.token_log_probs(logits, targets.to(torch.int32), temperature)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        slope = (logits / ctx.temperature).softmax(dim=1).neg_()  # [t, V]
        slope[torch.arange(len(targets)), targets] += 1
        return slope.mul_(grad[:, None] / ctx.temperature), None, None
