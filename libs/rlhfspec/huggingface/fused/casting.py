"""Rounding of a model's parameters. Rounding buffers too would put RoPE's cosines off by .3."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Precision:
    usual: torch.dtype
    in_float32: frozenset[str] = frozenset()  # parameters that stay so whatever is usual

    def of(self, name: str) -> torch.dtype:
        return torch.float32 if name in self.in_float32 else self.usual

    def rounded(self, name: str, parameter: Tensor) -> Tensor:
        return rounded(parameter, self.of(name))

    def holds(self, path: str) -> bool:
        """Return whether the module at `path` has a parameter that stays float32."""
        return any(name.startswith(f"{path}.") for name in self.in_float32)


def precision_of(model: nn.Module, dtype: torch.dtype) -> Precision:
    """Return the parameters' types when Hugging Face loads the model as `dtype`; classes may keep some float32."""
    if dtype != torch.bfloat16:
        return Precision(dtype)
    names = set[str]()
    for path, part in _pretrained(model, ""):
        listed = [pattern.replace("*", ".*") for pattern in part._get_dtype_plan(dtype)]
        for name, parameter in _without_values(part, dtype).named_parameters(remove_duplicate=False):
            if parameter.dtype == torch.float32 or any(re.search(pattern, name) for pattern in listed):
                names.add(f"{path}{name}")
    return Precision(dtype, frozenset(names))


def _pretrained(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(module, PreTrainedModel):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _pretrained(child, f"{path}{name}.")


def _without_values(model: Any, dtype: torch.dtype) -> Any:
    with torch.device("meta"), torch.random.fork_rng(devices=()):  # some classes draw numbers anyway
        return type(model)._from_config(copy.deepcopy(model.config), dtype=dtype, attn_implementation="eager")


def cast(model: nn.Module, precision: Precision) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(precision.of(name))


def narrow(model: nn.Module, precision: Precision) -> None:
    """Cast parameters to bfloat16 in place, except those that stay float32. `one_layer_wide` runs the result."""
    for name, parameter in model.named_parameters():
        if precision.of(name) == torch.bfloat16:
            parameter.data = parameter.data.to(torch.bfloat16)


def round_parameters(model: nn.Module, precision: Precision) -> dict[str, Tensor]:
    """Round parameters to bfloat16 in place, per `precision`, and return the originals by name."""
    before = {}
    for name, parameter in model.named_parameters():
        if precision.of(name) == torch.bfloat16:
            before[name] = parameter.data
            parameter.data = rounded(parameter.data, torch.bfloat16)
    return before


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the tensor rounded to `dtype` and stored as float32 (float64 for float64)."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.float64) if dtype == torch.float64 else tensor.to(dtype).to(torch.float32)
