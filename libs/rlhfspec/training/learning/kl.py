"""Estimates of KL(policy || reference) from sampled tokens (Schulman, "Approximating KL divergence", 2020).

With d = log policy - log reference at a token drawn from the policy:
    k1 = d                    unbiased, noisy, may be negative
    k2 = d^2 / 2              biased, low variance; *its gradient is the KL's own*, without bias
    k3 = exp(-d) - 1 + d      unbiased, low variance, never negative; its gradient is biased, right for small d

In the loss it is the gradient that counts: k1's is the score function, whose mean is zero, so k1 there is noise and no
pull towards the reference; it belongs into the reward.

Example:
    >>> import torch
    >>> policy, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    >>> [round(kl_estimate(policy, reference, name).item(), 4) for name in ("k1", "k2", "k3")]
    [0.5, 0.125, 0.1065]
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

KlEstimator = Literal["k1", "k2", "k3"]
LOG_RATIO_BOUND = (
    20.0  # exp of more is a runaway, not a probability ratio; bounded, it cannot turn 0 advantage into NaN
)


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """[t], [t] -> [t]."""
    difference = log_probs - reference_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    bounded = torch.clamp(-difference, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.exp(bounded) - 1 - bounded
