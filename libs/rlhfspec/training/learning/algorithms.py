"""A job's algorithm applied to a step: targets first, then losses of micro-batches.

    targets, metrics = prepare(algorithm, rollouts, policy_log_probs=..., max_tokens=256)
    mini = targets.mini_batch(algorithm, samples, max_tokens=256)
    for micro in packings of mini:
        terms = policy_terms(algorithm, log_probs, old_log_probs, mini.select(micro), entropy)
        terms.loss.backward()                            # and add up terms.losses, terms.sums

Micro-batches hold whole samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlhfspec.errors import RolloutError
from rlhfspec.job import Algorithm
from rlhfspec.messages.loop import scoring_stages
from rlhfspec.training.learning.advantages import informative_groups, overlong_penalties, token_rewards, whiten
from rlhfspec.training.learning.aggregation import token_indices, token_weights
from rlhfspec.training.learning.estimators import Estimator
from rlhfspec.training.learning.losses import (
    clip_values,
    clipped_policy_loss,
    clipped_value_loss,
    is_clipped,
    kl_estimate,
    sequence_ratio,
    token_ratio,
    truncated_importance_weights,
)
from rlhfspec.training.learning.rollouts import Rollouts

Metrics = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    lengths: Tensor  # [n] int64
    weights: Tensor  # [T] of token losses, fixed by the mini-batch
    advantages: Tensor  # [T]
    generator_log_probs: Tensor  # [T] under the distribution sampled from
    reference_log_probs: Tensor | None  # [T]
    returns: Tensor | None  # [T] the targets of the critic
    old_values: Tensor | None  # [T] the values scored for the rollouts

    def select(self, samples: Sequence[int]) -> Targets:
        """Return these samples' targets in this order, with unchanged weights."""
        chosen = torch.tensor(list(samples), dtype=torch.int64)
        tokens = token_indices(self.lengths, chosen)
        return replace(self, lengths=self.lengths[chosen], **self._of_tokens(lambda tensor: tensor[tokens]))

    def mini_batch(self, algorithm: Algorithm, samples: Sequence[int], *, max_tokens: int) -> Targets:
        """Return these samples' targets as one mini-batch, with recomputed weights."""
        chosen = self.select(samples)
        weights = token_weights(chosen.lengths, algorithm.loss_aggregation, max_tokens)
        return replace(chosen, weights=weights.to(self.weights.dtype))

    def to(self, device: torch.device) -> Targets:
        return replace(self, lengths=self.lengths.to(device), **self._of_tokens(lambda tensor: tensor.to(device)))

    def _of_tokens(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        values = {own.name: getattr(self, own.name) for own in fields(self) if own.name != "lengths"}
        return {name: value if value is None else change(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTerms:
    """Loss terms of a micro-batch, which add up over the mini-batch."""

    loss: Tensor  # scalar, to call backward on
    losses: Metrics  # its parts, weighted as in the loss but without their coefficients
    sums: Metrics  # over tokens; divide by the mini-batch's number of tokens for means


def needs_policy_log_probs(algorithm: Algorithm) -> bool:
    """Return whether `prepare` needs the trainer's log-probs, as a KL in the reward does."""
    return algorithm.kl_coefficient > 0 and algorithm.kl_placement == "reward"


def has_gradient(algorithm: Algorithm, targets: Targets) -> Tensor:
    """Return a mask [n] of samples whose policy loss can have a nonzero gradient."""
    is_in_loss = algorithm.kl_coefficient > 0 and algorithm.kl_placement == "loss"
    if is_in_loss or algorithm.entropy_coefficient > 0:
        return torch.ones(len(targets.lengths), dtype=torch.bool)
    parts = torch.split(targets.advantages != 0, targets.lengths.tolist())
    return torch.stack([part.any() for part in parts])


def prepare(
    algorithm: Algorithm, rollouts: Rollouts, *, policy_log_probs: Tensor | None, max_tokens: int
) -> tuple[Targets, Metrics]:
    """Return the step's targets (advantages, weights, returns) as one mini-batch, and metrics before training.

    policy_log_probs: [T] before the first update, at the sampling temperature.
    """
    assert rollouts.num_samples > 0, "a step without samples"
    _check_scores(algorithm, rollouts)
    rewards, metrics = shaped_rewards(algorithm, rollouts, max_tokens=max_tokens)
    kl = _kl_of_reward(algorithm, rollouts, policy_log_probs)
    at_tokens = token_rewards(rewards, rollouts.lengths, kl, algorithm.kl_coefficient)
    estimator: Estimator = algorithm.entry.load()
    advantages, returns = estimator(algorithm, rollouts, at_tokens)
    if algorithm.whiten_advantages:
        advantages = whiten(advantages)
    metrics |= _step_metrics(rollouts, advantages, returns)
    weights = token_weights(rollouts.lengths, algorithm.loss_aggregation, max_tokens)
    return Targets(
        lengths=rollouts.lengths,
        weights=weights.float(),
        advantages=advantages.float(),
        generator_log_probs=rollouts.generator_log_probs,
        reference_log_probs=rollouts.reference_log_probs,
        returns=None if returns is None else returns.float(),
        old_values=rollouts.values,
    ), metrics


def shaped_rewards(algorithm: Algorithm, rollouts: Rollouts, *, max_tokens: int) -> tuple[Tensor, Metrics]:
    if algorithm.overlong_buffer == 0:
        return rollouts.rewards, {}
    penalties = overlong_penalties(
        rollouts.lengths, max_tokens=max_tokens, buffer=algorithm.overlong_buffer, penalty=algorithm.overlong_penalty
    )
    return rollouts.rewards + penalties, {"overlong_penalty_mean": float(penalties.mean())}


def metrics_before_updates(
    algorithm: Algorithm, rollouts: Rollouts, log_probs: Tensor, entropy: Tensor, has_run: Tensor
) -> Metrics:
    """Return metrics over tokens that a forward has run (`has_run`), from tensors [T]."""
    metrics = {"entropy": float(entropy[has_run].double().mean())}
    if rollouts.reference_log_probs is not None:
        policy, reference = log_probs[has_run].double(), rollouts.reference_log_probs[has_run].double()
        for estimator in dict.fromkeys((algorithm.kl_estimator, "k3")):
            kl = kl_estimate(policy, reference, estimator)
            metrics[f"kl_{estimator}"] = float((kl if estimator == "k1" else kl.clamp(min=0)).mean())  # rounding
    return metrics


def policy_terms(
    algorithm: Algorithm, log_probs: Tensor, old_log_probs: Tensor, targets: Targets, entropy: Tensor | None
) -> TokenTerms:
    """Return the policy's loss terms over a micro-batch of whole samples.

    `log_probs` [t] carry the gradient; `old_log_probs` [t] precede the step's first update; `entropy` [t] is needed for
    a positive `entropy_coefficient`.
    """
    ratio = _ratio(algorithm, log_probs, old_log_probs, targets.lengths)
    clip = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    policy = clipped_policy_loss(ratio, targets.advantages, **clip)
    low, high = is_clipped(ratio.detach(), targets.advantages, **clip)
    sums = {
        "clip_fraction_low": low,
        "clip_fraction_high": high,
        "approximate_kl": kl_estimate(old_log_probs, log_probs.detach(), "k3"),  # how far the step has moved
    }
    if algorithm.importance_cap is not None:
        weights = truncated_importance_weights(old_log_probs, targets.generator_log_probs, algorithm.importance_cap)
        policy = policy * weights
        sums |= {"importance_weight": weights, "importance_capped_fraction": weights >= algorithm.importance_cap}
    terms, losses = [policy], {"policy_loss": policy}
    if targets.reference_log_probs is not None and algorithm.kl_placement == "loss":
        losses["kl_loss"] = kl_estimate(log_probs, targets.reference_log_probs, algorithm.kl_estimator)
        terms.append(algorithm.kl_coefficient * losses["kl_loss"])
    if algorithm.entropy_coefficient > 0:
        assert entropy is not None, "entropyCoefficient is above 0: the forward must give the entropy"
        terms.append(-algorithm.entropy_coefficient * entropy)
    return _token_terms(terms, losses, sums, targets.weights)


def value_terms(algorithm: Algorithm, values: Tensor, targets: Targets) -> TokenTerms:
    assert targets.returns is not None, "the algorithm trains no critic"
    assert targets.old_values is not None
    loss = clipped_value_loss(values, targets.old_values, targets.returns, clip=algorithm.value_clip)
    detached = values.detach()
    held = clip_values(detached, targets.old_values, algorithm.value_clip)
    clipped = (held - targets.returns).abs() > (detached - targets.returns).abs()
    sums = {"value": detached, "value_clip_fraction": clipped}
    return _token_terms([algorithm.value_coefficient * loss], {"value_loss": loss}, sums, targets.weights)


def _ratio(algorithm: Algorithm, log_probs: Tensor, old_log_probs: Tensor, lengths: Tensor) -> Tensor:
    if algorithm.ratio_level == "sequence":
        return sequence_ratio(log_probs, old_log_probs, lengths)
    return token_ratio(log_probs, old_log_probs)


def _kl_of_reward(algorithm: Algorithm, rollouts: Rollouts, policy_log_probs: Tensor | None) -> Tensor | None:
    if not needs_policy_log_probs(algorithm):
        return None
    assert policy_log_probs is not None, "the KL is in the reward: needs the trainer's log-probs"
    assert rollouts.reference_log_probs is not None
    reference = rollouts.reference_log_probs.double()
    return kl_estimate(policy_log_probs.detach().cpu().double(), reference, algorithm.kl_estimator)


def _check_scores(algorithm: Algorithm, rollouts: Rollouts) -> None:
    have = {
        "reward": True,
        "reference": rollouts.reference_log_probs is not None,
        "critic": rollouts.values is not None,
    }
    for stage in scoring_stages(algorithm):
        if not have[stage]:
            raise RolloutError(rollouts.ids[0], f"has no {stage} score")


def _step_metrics(rollouts: Rollouts, advantages: Tensor, returns: Tensor | None) -> Metrics:
    rewards, lengths = rollouts.rewards, rollouts.lengths.double()
    metrics = {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "reward_min": float(rewards.min()),
        "reward_max": float(rewards.max()),
        "informative_fraction": float(informative_groups(rewards, rollouts.group_index).double().mean()),
        "truncated_fraction": float(rollouts.truncated.double().mean()),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "advantage_abs_mean": float(advantages.abs().mean()),
    }
    metrics |= {f"reward_source_{name}": float(values.mean()) for name, values in rollouts.reward_components.items()}
    if returns is not None and rollouts.values is not None:
        metrics["explained_variance"] = _explained_variance(rollouts.values.double(), returns)
    return metrics


def _explained_variance(values: Tensor, returns: Tensor) -> float:
    variance = float(returns.var(correction=0))
    return 1.0 - float((returns - values).var(correction=0)) / variance if variance > 0 else 0.0


def _token_terms(
    terms: list[Tensor], losses: dict[str, Tensor], sums: dict[str, Tensor], weights: Tensor
) -> TokenTerms:
    loss = (torch.stack(terms).sum(0) * weights).sum()
    numbers = [(part.detach().double() * weights).sum() for part in losses.values()]
    numbers += [part.detach().double().sum() for part in sums.values()]
    said = torch.stack(numbers).tolist()  # one device synchronization
    return TokenTerms(
        loss=loss, losses=dict(zip(losses, said, strict=False)), sums=dict(zip(sums, said[len(losses) :], strict=True))
    )
