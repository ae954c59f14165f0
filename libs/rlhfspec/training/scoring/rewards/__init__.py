"""Rewards: Python functions, sequence-classification models, HTTP endpoints (docs/rewards.md)."""

from rlhfspec.training.scoring.rewards.sources import RewardSources

__all__ = ["RewardSources"]
