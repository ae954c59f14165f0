"""Float32 forward of a model kept in bfloat16, with one layer widened at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rlhfspec.huggingface.fused.guard import WeightProducts
from rlhfspec.huggingface.structure.layers import layers_of


def outside(model: nn.Module, layers: Iterable[nn.Module]) -> list[nn.Parameter]:
    within = {part for layer in layers for part in layer.modules()}
    modules = [module for module in model.modules() if module not in within]
    return list(dict.fromkeys(p for module in modules for p in module._parameters.values() if p is not None))


def widen(parameters: Iterable[nn.Parameter]) -> None:
    """Convert bfloat16 parameters to float32 in place."""
    for parameter in parameters:
        if parameter.dtype == torch.bfloat16:
            parameter.data = parameter.data.float()


@contextmanager
def one_layer_wide(model: nn.Module, knows: WeightProducts | None = None) -> Iterator[None]:
    """Widen each layer to float32 while it runs, other weights throughout. `knows`: mode that tracks the copies."""
    layers = layers_of(model)
    running: list[Any] = []  # layers do not nest, but one may run again

    def enter(module: nn.Module, args: Any) -> None:
        running.append(_wide(module.parameters(), knows))
        running[-1].__enter__()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop().__exit__(None, None, None)

    handles = []
    with _wide(outside(model, layers), knows):
        for layer in layers:
            handles.append(layer.register_forward_pre_hook(enter))
            handles.append(layer.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            while running:  # an error was raised on the way into a layer
                leave(model, (), None)


@contextmanager
def _wide(parameters: Iterable[nn.Parameter], knows: WeightProducts | None) -> Iterator[None]:
    narrow = [(parameter, parameter.data) for parameter in parameters if parameter.dtype == torch.bfloat16]
    with torch.inference_mode(False):
        for parameter, kept in narrow:
            parameter.data = kept.float()
            if knows is not None:
                knows.copied(kept, parameter.data)
    try:
        yield
    finally:
        for parameter, kept in narrow:
            if knows is not None:
                knows.gone(parameter.data)
            parameter.data = kept
