"""Search for a model's layers."""

from __future__ import annotations

from torch import nn


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules of the outermost ModuleList with the most weights."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    within = {part for each in lists for part in each.modules() if part is not each}
    outermost = [each for each in lists if each not in within]
    return list(dict.fromkeys(max(outermost, key=num_weights, default=())))


def num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
