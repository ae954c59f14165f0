"""Token losses before aggregation: probability ratios, KL and clipped losses."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlhfspec.training.learning.aggregation import per_token, sample_sums

KlEstimator = Literal["k1", "k2", "k3"]
_LOG_RATIO_BOUND = 20.0  # larger log-ratios are runaways; the bound keeps exp(...) * 0 from being NaN


def kl_estimate(log_probs: Tensor, reference_log_probs: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy || reference) at sampled tokens: [t], [t] -> [t] (Schulman, "Approximating KL", 2020).

    With d = log policy - log reference at a token drawn from the policy:
        k1 = d                    unbiased, noisy, may be negative
        k2 = d^2 / 2              biased, low variance; unbiased gradient
        k3 = exp(-d) - 1 + d      unbiased, low variance, never negative; gradient biased for large d

    Use k1 only in the reward: as a loss, its gradient has mean zero.
    """
    difference = log_probs - reference_log_probs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    bounded = torch.clamp(-difference, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return torch.exp(bounded) - 1 - bounded


def truncated_importance_weights(log_probs: Tensor, generator_log_probs: Tensor, cap: float) -> Tensor:
    """Return min(trainer / generator, cap) at each token, without gradient: [t], [t] -> [t] (Ionides 2008).

    `log_probs` are the trainer's before the first update.
    """
    log_ratio = torch.clamp(log_probs.detach() - generator_log_probs, max=_LOG_RATIO_BOUND)
    return torch.exp(log_ratio).clamp(max=cap)


def token_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    return torch.exp(torch.clamp(log_probs - old_log_probs, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND))


def sequence_ratio(log_probs: Tensor, old_log_probs: Tensor, lengths: Tensor) -> Tensor:
    """Return GSPO-token's (policy / old policy) ** (1 / |y|) of whole responses, repeated by token: [t] -> [t].

    A token's gradient goes through its own log-prob only.
    """
    detached = (log_probs - old_log_probs).detach()
    mean = sample_sums(detached, lengths) / lengths  # [n]
    bounded = torch.clamp(mean, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).to(log_probs.dtype)
    return torch.exp(per_token(bounded, lengths) + (log_probs - log_probs.detach()))  # the bracket is exactly 0


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Return PPO's -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): [t], [t] -> [t]."""
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def is_clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return masks of the tokens clipped below and above."""
    return (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Return max((V - R)^2, (clip(V, V_old +- clip) - R)^2), not halved: [t] -> [t]."""
    return torch.maximum((values - returns).square(), (clip_values(values, old_values, clip) - returns).square())


def clip_values(values: Tensor, old_values: Tensor, clip: float) -> Tensor:
    return torch.clamp(values, old_values - clip, old_values + clip)
