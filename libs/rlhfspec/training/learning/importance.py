"""Ratios of probabilities: of the policy to itself before the step, and of the trainer to the generator.

Example:
    >>> import torch
    >>> truncated_importance_weights(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -4.0]), cap=2.0)
    tensor([1., 2.])
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlhfspec.training.learning.aggregation import per_token, sample_sums
from rlhfspec.training.learning.kl import LOG_RATIO_BOUND


def truncated_importance_weights(log_probs: Tensor, generator_log_probs: Tensor, cap: float) -> Tensor:
    """min(trainer / generator, cap) at each token, without gradient: [t], [t] -> [t].

    `log_probs` are the trainer's before the step's first update. What the generator's lag (staleness) or its arithmetic
    made different is weighed back; the cap bounds the variance at the price of some bias (Ionides 2008, "Truncated
    importance sampling").
    """
    log_ratio = torch.clamp(log_probs.detach() - generator_log_probs, max=LOG_RATIO_BOUND)
    return torch.exp(log_ratio).clamp(max=cap)


def token_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """policy / old policy at each token: [t], [t] -> [t]."""
    return torch.exp(torch.clamp(log_probs - old_log_probs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, lengths: Tensor) -> Tensor:
    """GSPO: (policy / old policy of the whole response) ** (1 / |y|), repeated for its tokens: [t] -> [t].

    A token's gradient goes through its own log-prob only (the paper's GSPO-token); where a response's tokens share one
    advantage, value and gradient are those of the sequence form. Responses must be whole.
    """
    detached = (log_probs - old_log_probs).detach()
    mean = sample_sums(detached, lengths) / lengths  # [n]
    bounded = torch.clamp(mean, -LOG_RATIO_BOUND, LOG_RATIO_BOUND).to(log_probs.dtype)
    return torch.exp(per_token(bounded, lengths) + (log_probs - log_probs.detach()))  # the bracket is exactly 0
