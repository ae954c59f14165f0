"""Advantage estimators by algorithm, as named in `rlhfspec.job.choices.algorithms`."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rlhfspec.job import Algorithm
from rlhfspec.training.learning.advantages import discounted_sums, gae, group_advantages, leave_one_out_advantages
from rlhfspec.training.learning.aggregation import per_token, sample_sums
from rlhfspec.training.learning.rollouts import Rollouts

# Maps token rewards [T] float64 (`token_rewards`) to advantages [T] and, with a critic, its target values [T].
Estimator = Callable[[Algorithm, Rollouts, Tensor], tuple[Tensor, Tensor | None]]


def against_values(algorithm: Algorithm, rollouts: Rollouts, at_tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    assert rollouts.values is not None
    values = rollouts.values.double()
    return gae(at_tokens, values, rollouts.lengths, gamma=algorithm.gamma, gae_lambda=algorithm.gae_lambda)


def against_group(algorithm: Algorithm, rollouts: Rollouts, at_tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    totals = sample_sums(at_tokens, rollouts.lengths)
    advantages = group_advantages(totals, rollouts.group_index, normalize_by_std=algorithm.normalize_by_std)
    return per_token(advantages, rollouts.lengths), None


def against_others(algorithm: Algorithm, rollouts: Rollouts, at_tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    totals = sample_sums(at_tokens, rollouts.lengths)
    return per_token(leave_one_out_advantages(totals, rollouts.group_index), rollouts.lengths), None


def reward_to_go(algorithm: Algorithm, rollouts: Rollouts, at_tokens: Tensor) -> tuple[Tensor, Tensor | None]:
    return discounted_sums(at_tokens, rollouts.lengths, algorithm.gamma), None
