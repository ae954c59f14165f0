"""Advantage estimators. Sample tensors are `[n]`, token tensors `[T]`, sample by sample."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

GROUP_EPSILON = 1e-4  # added to a group's deviation, so that near-equal rewards are not blown up
WHITEN_EPSILON = 1e-8  # added to a variance


def token_rewards(rewards: Tensor, lengths: Tensor, kl: Tensor | None, kl_coefficient: float) -> Tensor:
    """Return the reward at each last token, minus `kl_coefficient` * KL at every token: [n] -> [T].

    >>> token_rewards(torch.tensor([1.0]), torch.tensor([2]), torch.tensor([0.5, 0.25]), 0.1)
    tensor([-0.0500,  0.9750])
    """
    at_tokens = rewards.new_zeros(int(lengths.sum()))
    at_tokens[lengths.cumsum(0) - 1] = rewards
    return at_tokens if kl is None else at_tokens - kl_coefficient * kl


def overlong_penalties(lengths: Tensor, *, max_tokens: int, buffer: int, penalty: float) -> Tensor:
    """Return DAPO's length penalty [n]: 0 up to max_tokens - buffer, then linear to -penalty at max_tokens."""
    below = (max_tokens - buffer - lengths).clamp(max=0).double()
    return below / buffer * penalty


def group_advantages(
    rewards: Tensor, group_index: Tensor, *, normalize_by_std: bool, epsilon: float = GROUP_EPSILON
) -> Tensor:
    """Return GRPO's (r - mean) / (std + epsilon) by group, or Dr.GRPO's without the division: [n].

    The std divides by n - 1. Groups of one sample or of equal rewards get exactly 0.
    """
    sizes, means = _group_means(rewards, group_index)
    centred = (rewards - means[group_index]).masked_fill(~informative_groups(rewards, group_index), 0)
    if not normalize_by_std:
        return centred
    squares = torch.zeros_like(means).index_add(0, group_index, centred.square())
    deviations = (squares / (sizes - 1).clamp(min=1)).sqrt()
    return centred / (deviations[group_index] + epsilon)


def leave_one_out_advantages(rewards: Tensor, group_index: Tensor) -> Tensor:
    """Return RLOO's r minus the mean reward of the group's *other* samples, 0 without others: [n]."""
    sizes, means = _group_means(rewards, group_index)
    factor = sizes / (sizes - 1).clamp(min=1)  # r - mean(others) = n / (n - 1) * (r - mean(all))
    centred = (rewards - means[group_index]).masked_fill(~informative_groups(rewards, group_index), 0)
    return centred * factor[group_index]


def informative_groups(rewards: Tensor, group_index: Tensor) -> Tensor:
    num_groups = int(group_index.max()) + 1 if len(group_index) else 0
    highest = rewards.new_full((num_groups,), -torch.inf).scatter_reduce(0, group_index, rewards, "amax")
    lowest = rewards.new_full((num_groups,), torch.inf).scatter_reduce(0, group_index, rewards, "amin")
    return (highest > lowest)[group_index]


def discounted_sums(numbers: Tensor, lengths: Tensor, discount: float) -> Tensor:
    """Return s[t] = x[t] + discount * s[t + 1] within each sample: [T] -> [T].

    >>> discounted_sums(torch.tensor([1.0, 1.0, 4.0]), torch.tensor([2, 1]), 0.5)
    tensor([1.5000, 1.0000, 4.0000])
    """
    rows = pad_sequence(list(torch.split(numbers, lengths.tolist())), batch_first=True)  # [n, longest], zero-padded
    running, sums = rows.new_zeros(len(rows)), torch.empty_like(rows)
    for column in reversed(range(rows.shape[1])):
        running = rows[:, column] + discount * running
        sums[:, column] = running
    return sums[torch.arange(rows.shape[1]) < lengths[:, None]]


def gae(rewards: Tensor, values: Tensor, lengths: Tensor, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Return advantages and returns [T] by generalized advantage estimation (Schulman 2016).

    delta[t] = r[t] + gamma V[t + 1] - V[t], A[t] = sum over k of (gamma lambda)^k delta[t + k], return = A + V.
    V is 0 after the last token, also for truncated responses.
    """
    next_values = values.roll(-1)
    next_values[lengths.cumsum(0) - 1] = 0
    advantages = discounted_sums(rewards + gamma * next_values - values, lengths, gamma * gae_lambda)
    return advantages, advantages + values


def whiten(numbers: Tensor) -> Tensor:
    """Normalize a step's values to mean 0 and deviation 1 (n - 1): [T] -> [T]. A single value becomes 0."""
    centred = numbers - numbers.mean()
    variance = centred.square().sum() / max(len(numbers) - 1, 1)
    return centred * torch.rsqrt(variance + WHITEN_EPSILON)


def _group_means(rewards: Tensor, group_index: Tensor) -> tuple[Tensor, Tensor]:
    sizes = torch.bincount(group_index)  # [groups]
    sums = rewards.new_zeros(len(sizes)).index_add(0, group_index, rewards)
    return sizes, sums / sizes
