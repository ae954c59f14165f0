"""How a model's weights are kept in fewer bits: as Hugging Face keeps them in a model that it loads so.

Parameters are rounded, but for those that the model's class keeps in float32 (routers of experts, sinks). Buffers are
not: with the frequencies of RoPE in 8 bits a cosine is off by .02 at position 100 and by .3 at position 1,000.

Example:
    >>> from rlhfspec.tiny import random_model
    >>> model = random_model("llama", seed=0)
    >>> cast(model, precision_of(model, torch.bfloat16))
    >>> model.lm_head.weight.dtype, model.model.rotary_emb.inv_freq.dtype
    (torch.bfloat16, torch.float32)
"""

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
    """In what each parameter of a model is kept."""

    usual: torch.dtype
    in_float32: frozenset[str] = frozenset()  # names of the parameters that stay so whatever is usual

    def of(self, name: str) -> torch.dtype:
        """
        >>> Precision(torch.bfloat16, frozenset({"gate.weight"})).of("gate.weight")
        torch.float32
        """
        return torch.float32 if name in self.in_float32 else self.usual

    def rounded(self, name: str, parameter: Tensor) -> Tensor:
        """The value as it is kept, in the type that our kernels take."""
        return rounded(parameter, self.of(name))

    def holds(self, path: str) -> bool:
        """Is any parameter of the module at `path` in float32 though that is not usual?"""
        return any(name.startswith(f"{path}.") for name in self.in_float32)


def precision_of(model: nn.Module, dtype: torch.dtype) -> Precision:
    """What Hugging Face would keep the model's parameters in, had it loaded it as `dtype`.

    A class may ask for float32 when it makes a parameter, which a model without values shows, or list parts of names.
    """
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
    """The outermost models of transformers, and what their parameters' names begin with."""
    if isinstance(module, PreTrainedModel):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _pretrained(child, f"{path}{name}.")


def _without_values(model: Any, dtype: torch.dtype) -> Any:
    with torch.device("meta"), torch.random.fork_rng(devices=()):  # some draw numbers all the same
        return type(model)._from_config(copy.deepcopy(model.config), dtype=dtype, attn_implementation="eager")


def cast(model: nn.Module, precision: Precision) -> None:
    """In place. Parameters only: a buffer keeps its type and its values."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(precision.of(name))


def narrow(model: nn.Module, precision: Precision) -> None:
    """In place, before anything is proved: parameters that are to be bfloat16 are so, and `widened` runs them."""
    for name, parameter in model.named_parameters():
        if precision.of(name) == torch.bfloat16:
            parameter.data = parameter.data.to(torch.bfloat16)


def round_parameters(model: nn.Module, precision: Precision) -> dict[str, Tensor]:
    """In place, to what is left of them when they are kept so, in the type that our kernels take.

    Returns what they were, by their names, where that is something else.
    """
    before = {}
    for name, parameter in model.named_parameters():
        if precision.of(name) == torch.bfloat16:
            before[name] = parameter.data
            parameter.data = rounded(parameter.data, torch.bfloat16)
    return before


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The value as `dtype` keeps it, in float32 (float64 where that is what is kept)."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.float64) if dtype == torch.float64 else tensor.to(dtype).to(torch.float32)
