"""The rewarding stage: the reward of each response."""
