"""Losses of single tokens, before aggregation. Lower is better; advantages carry no gradient.

Example:
    >>> import torch
    >>> ratio, advantages = torch.tensor([1.5, 1.5, 0.5]), torch.tensor([1.0, -1.0, -1.0])
    >>> clipped_policy_loss(ratio, advantages, clip_low=0.2, clip_high=0.28)
    tensor([-1.2800,  1.5000,  0.8000])
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """PPO's -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): [t], [t] -> [t].

    The gradient is zero where the ratio already went past the clip in the direction that the advantage asks for.
    """
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def is_clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Where the clip holds, below and above: two [t] bool."""
    return (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """max((V - R)^2, (clip(V, V_old +- clip) - R)^2): [t] -> [t]. Half of it is what most other code calls the loss."""
    return torch.maximum((values - returns).square(), (clip_values(values, old_values, clip) - returns).square())


def clip_values(values: Tensor, old_values: Tensor, clip: float) -> Tensor:
    """Values held within `clip` of the old ones.

    >>> clip_values(torch.tensor([1.0, -3.0]), torch.tensor([0.0, 0.0]), 0.5)
    tensor([ 0.5000, -0.5000])
    """
    return torch.clamp(values, old_values - clip, old_values + clip)
