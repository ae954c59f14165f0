"""A drafter made from the policy: its first layer, a learning layer that starts as its last one, and its head. All
other weights follow the policy's updates."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.structure.causal_lm import text_config

_LEAST_LAYERS = 3  # with two layers the drafter would be the policy itself


def early_exit(policy: Any) -> Any:
    """Return the early-exit drafter of a Hugging Face causal LM. Raise UnsupportedModel if it has no list of layers."""
    name, layers = _layers(policy)
    parent_name, _, leaf = name.rpartition(".")
    parent = policy.get_submodule(parent_name)
    setattr(parent, leaf, nn.ModuleList([layers[0], layers[-1]]))
    try:
        drafter = copy.deepcopy(policy)
    finally:
        setattr(parent, leaf, layers)
    _shorten(text_config(drafter), len(layers))
    for module in drafter.get_submodule(f"{name}.1").modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            module.layer_idx = 1
    return drafter


def learning_names(drafter: Any) -> set[str]:
    """Return the parameters of an early exit that learn: its second layer, and vectors outside the layers (norms)."""
    name, _ = _layers(drafter, least=2)
    return {
        path
        for path, parameter in drafter.named_parameters()
        if path.startswith(f"{name}.1.") or (parameter.ndim == 1 and not path.startswith(f"{name}."))
    }


def _layers(model: Any, least: int = _LEAST_LAYERS) -> tuple[str, nn.ModuleList]:
    count = text_config(model).num_hidden_layers
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if count < least or len(found) != 1:
        few = f"has {count} layers, and a drafter made of it needs {least}"
        problem = few if count < least else "has no single list of its layers to make a drafter of"
        raise UnsupportedModel("drafter", type(model).__name__, f"{problem}: name a model, or none")
    return found[0]


def _shorten(config: Any, count: int) -> None:
    for key, value in list(vars(config).items()):
        if isinstance(value, list | tuple) and len(value) == count and not key.startswith("_"):
            setattr(config, key, type(value)((value[0], value[-1])))
    config.num_hidden_layers = 2
