"""Rewards: Python functions, sequence-classification models, HTTP endpoints (docs/rewards.md)."""

from rlhfspec.scoring.rewards.groups import Groups
from rlhfspec.scoring.rewards.sources import RewardSources

__all__ = ["Groups", "RewardSources"]
