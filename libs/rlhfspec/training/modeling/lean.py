"""Forwards that keep fewer arrays for the backward pass, which computes them again with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rlhfspec.common.context import holding


def keep_less(model: nn.Module) -> None:
    """Make norms keep only their input x, and every `down(act(gate(x)) * up(x))` only gate(x) and up(x)."""
    same: dict[type[nn.Module], bool] = {}
    for module in model.modules():
        if _is_norm(module):
            module.forward = partial(_norm, module)
        elif [name for name, _ in module.named_children()] == ["gate_proj", "up_proj", "down_proj", "act_fn"]:
            kind = type(module)
            same[kind] = same[kind] if kind in same else _is_gated(module)
            if same[kind]:
                module.forward = partial(_mlp, module)


_runs_again: ContextVar[bool] = ContextVar("whole layers run again, so nothing smaller must", default=False)


def whole_layers() -> AbstractContextManager[None]:
    """Keep nothing less in forwards of this context and thread: hooks in a checkpointed layer would keep arrays."""
    return holding(_runs_again, True)


def _is_norm(module: nn.Module) -> bool:
    weights = [*module.parameters()]
    return len(weights) == 1 and weights[0].ndim == 1 and type(module).__name__.endswith("RMSNorm")


@torch.no_grad()
def _is_gated(module: Any) -> bool:
    """Return whether this MLP computes what `_mlp` does, to the bit."""
    weight = module.gate_proj.weight
    x = torch.linspace(-2, 2, 3 * weight.shape[1], dtype=weight.dtype, device=weight.device).view(1, 3, -1)
    return torch.equal(module(x), _mlp(module, x))


def _norm(norm: nn.Module, *inputs: Any) -> Any:
    return _again(partial(type(norm).forward, norm), *inputs)


def _mlp(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    gate, up, act = mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn
    gated = _again(lambda gate, up: act(gate) * up, gate, up)
    kept = gate.detach(), up.detach()
    with made_again((gated, lambda: act(kept[0]) * kept[1])):
        return mlp.down_proj(gated)  # type: ignore[no-any-return]


def _again(function: Callable[..., Any], *inputs: Any) -> Any:
    if _runs_again.get() or not torch.is_grad_enabled():
        return function(*inputs)
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)


def made_again(*makers: tuple[torch.Tensor, Callable[[], torch.Tensor]]) -> AbstractContextManager[Any]:
    """Return a context in which forwards do not keep these tensors, or views of them, but make them again.

    A maker must not hold its tensor, which would stay alive as long as the graph.
    """
    if not makers or _runs_again.get():
        return nullcontext()
    known = {tensor.untyped_storage()._cdata: (tensor.numel(), make) for tensor, make in makers}

    def drop(saved: torch.Tensor) -> Any:
        num, make = known.get(saved.untyped_storage()._cdata, (-1, None))
        return (make, saved.shape) if num == saved.numel() and saved.is_contiguous() else saved

    def restore(saved: Any) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else saved[0]().view(saved[1])

    return saved_tensors_hooks(drop, restore)
