"""Tensor parallel training, with layers cut as in the generator.

    colwise     input is the same on all ranks        <- its gradient is all-reduced
    rowwise     outputs are all-reduced               <- all have the gradient
    embedding   as rowwise
    head        parts are gathered to all logits      <- each takes its part of the gradient
    q_norm      each rank norms its own heads         <- the weight's gradient is all-reduced

Activations between layers, the loss and replicated gradients have the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.cutting import (
    BY_COLUMNS,
    BY_ROWS,
    HEADS_APART,
    JOINED,
    LOOKED_UP,
    added,
    joined,
    looked_up,
    planned,
    share,
)
from rlhfspec.training.modeling.stored import Share

_SHARES_ATTRIBUTE = "rlhfspec_shares"  # on a module: this rank's shares of its weights


def cut(model: Any, group: Ranks | None, *, field: str) -> None:
    """Cut a whole model in place to this rank's part.

    Raise InvalidRequest if the model has no plan or its sizes are not divisible by the ranks.
    """
    if group is None:
        return
    kind = type(model).__name__
    styles = planned(model, kind, group.num_ranks, field)
    modules = {path: model.get_submodule(path) for path in styles}
    for path, style in styles.items():
        if style in (BY_COLUMNS, BY_ROWS, JOINED) and not isinstance(modules[path], nn.Linear):
            raise InvalidRequest(field, kind, f"cannot be cut to train: {path} is no linear layer")
    made: dict[int, nn.Parameter] = {}  # keeps tied weights tied
    spread = _Spread(group)
    for path, style in styles.items():
        _lay_out(modules[path], style, group, spread)
        _take_part(modules[path], style, group, made)


def shares_of(module: nn.Module) -> dict[str, Share]:
    return {
        f"{path}.{leaf}": part
        for path, inner in module.named_modules()
        for leaf, part in getattr(inner, _SHARES_ATTRIBUTE, {}).items()
    }


def _take_part(module: Any, style: str, group: Ranks, made: dict[int, nn.Parameter]) -> None:
    shares: dict[str, Share] = {}
    for leaf, parameter in module._parameters.items():
        dim = {BY_COLUMNS: 0, JOINED: 0, LOOKED_UP: 0, BY_ROWS: 1 if leaf == "weight" else None}.get(style)
        if parameter is None or dim is None:
            continue
        size = parameter.shape[dim]
        first, count = share(size, group.rank, group.num_ranks)
        shares[leaf] = Share(dim=dim, start=first, stop=first + count, size=size)
        if id(parameter) not in made:
            part = parameter.detach().narrow(dim, first, count).clone(memory_format=torch.contiguous_format)
            made[id(parameter)] = nn.Parameter(part, requires_grad=parameter.requires_grad)
            made[id(made[id(parameter)])] = made[id(parameter)]
        module._parameters[leaf] = made[id(parameter)]
    if shares:
        object.__setattr__(module, _SHARES_ATTRIBUTE, shares)
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape


def _lay_out(module: Any, style: str, group: Ranks, spread: _Spread) -> None:
    if style in (BY_COLUMNS, JOINED):
        module.register_forward_pre_hook(spread)
    if style == JOINED:
        width = module.out_features
        module.register_forward_hook(lambda module, args, output: _Joined.apply(output, width, group))  # type: ignore[no-untyped-call]
    elif style == BY_ROWS:
        module.forward = _rows(module, group)
    elif style == LOOKED_UP:
        module.padding_idx = _padding(module, group)
        module.forward = looked_up(module, module.forward, group, _Added.apply)
    elif style == HEADS_APART:
        module.register_forward_pre_hook(_adding_gradients(group))


def _rows(module: nn.Linear, group: Ranks) -> Callable[[Tensor], Tensor]:
    """Return a row-parallel forward, which adds the replicated bias once."""

    def forward(hidden: Tensor) -> Tensor:
        part = functional.linear(hidden, module.weight)
        output: Tensor = _Added.apply(part, group)  # type: ignore[no-untyped-call]
        return output if module.bias is None else output + module.bias

    return forward


def _padding(module: nn.Embedding, group: Ranks) -> int | None:
    first, count = share(module.num_embeddings, group.rank, group.num_ranks)
    index = module.padding_idx
    return index - first if index is not None and first <= index < first + count else None


def _adding_gradients(group: Ranks) -> Callable[[nn.Module, Any], None]:
    known: dict[str, nn.Parameter] = {}  # FSDP2 replaces the parameters

    def add(gradient: Tensor) -> Tensor:
        return added(gradient.clone(), group)

    def before(module: nn.Module, args: Any) -> None:
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and torch.is_grad_enabled() and known.get(leaf) is not parameter:
                parameter.register_hook(add)  # type: ignore[no-untyped-call]
                known[leaf] = parameter

    return before


class _Spread:
    """Input hook of column-parallel layers. Layers with the same input share an all-reduce of its gradient."""

    def __init__(self, group: Ranks) -> None:
        self._group = group
        self._last: tuple[Tensor, Tensor] | None = None

    def __call__(self, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden, *others = args
        if not (torch.is_grad_enabled() and hidden.requires_grad):
            return args
        if self._last is None or self._last[0] is not hidden:
            self._last = (hidden, _SameIn.apply(hidden, self._group))  # type: ignore[no-untyped-call]
        return (self._last[1], *others)


class _SameIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, group: Ranks) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return added(gradient.contiguous().clone(), ctx.group), None


class _Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Ranks) -> Tensor:
        return added(part.clone(), group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, width: int, group: Ranks) -> Tensor:
        ctx.here = share(width, group.rank, group.num_ranks)
        return joined(part, width, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.narrow(-1, *ctx.here), None, None
