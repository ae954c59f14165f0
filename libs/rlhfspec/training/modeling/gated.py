"""Gated MLPs that keep two of their four intermediate arrays, and compute the other two again in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

_PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


def keep_less_of_mlps(model: nn.Module) -> None:
    """Make every `down(act(gate(x)) * up(x))` of the model keep only gate(x) and up(x), with the same bits."""
    same: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        if [name for name, _ in module.named_children()] == [*_PARTS]:
            kind = type(module)
            same[kind] = same[kind] if kind in same else _is_gated(module)
            if same[kind]:
                module.forward = partial(_forward, module)


def keep_all_of_mlps(model: nn.Module) -> None:
    """Undo `keep_less_of_mlps`, which would keep arrays where whole layers run again."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, partial) and forward.func is _forward:
            del module.forward


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """Return whether this MLP computes what `_forward` does, to the bit."""
    weight = module.gate_proj.weight
    x = torch.linspace(-2, 2, 3 * weight.shape[1], dtype=weight.dtype, device=weight.device).view(1, 3, -1)
    return torch.equal(module(x), _forward(module, x))


def _forward(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up, act = mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn
    gated: torch.Tensor = _Gated.apply(gate, up, act)  # type: ignore[no-untyped-call]
    kept, known = (gate.detach(), up.detach()), (gated.untyped_storage()._cdata, gated.numel(), True)

    def drop(saved: torch.Tensor) -> torch.Tensor | torch.Size:  # lives as long as the graph, so it must not hold gated
        is_gated = (saved.untyped_storage()._cdata, saved.numel(), saved.is_contiguous()) == known
        return saved.shape if is_gated else saved

    def restore(saved: torch.Tensor | torch.Size) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else (act(kept[0]) * kept[1]).view(saved)

    with saved_tensors_hooks(drop, restore):
        return mlp.down_proj(gated)  # type: ignore[no-any-return]


class _Gated(torch.autograd.Function):
    """Product act(gate) * up, which keeps gate and up alone for its backward pass."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, act: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act(gate) * up  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            active = ctx.act(leaf)
        (of_gate,) = torch.autograd.grad(active, leaf, gradient * up)
        return of_gate, gradient * active.detach(), None
