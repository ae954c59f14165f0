"""Detection of groups whose rewards are all equal: their advantages are zero, so they teach nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

from rlhfspec.messages.records.metrics import StepMetrics

NUM_STEPS = 3  # one step of equal groups is chance


def equal_reward_groups(groups: Sequence[Hashable], rewards: Sequence[float]) -> int | None:
    """Return the number of groups with only one distinct reward; None if every group has one sample."""
    by_group: defaultdict[Hashable, set[float]] = defaultdict(set)
    for group, reward in zip(groups, rewards, strict=True):
        by_group[group].add(reward)
    if len(by_group) == len(rewards):
        return None
    return sum(len(different) == 1 for different in by_group.values())


def equal_rewards_warning(steps: Sequence[StepMetrics]) -> str:
    """Return a warning if all groups of the last steps had equal rewards; otherwise ""."""
    recent = steps[-NUM_STEPS:]
    if len(recent) < NUM_STEPS or any(step.equal_reward_groups != step.num_prompts for step in recent):
        return ""
    rewards = f"rewards were equal in every group of the last {NUM_STEPS} steps"
    return f"{rewards}: nothing is learnt. See what the reward gives, in samples.jsonl"
