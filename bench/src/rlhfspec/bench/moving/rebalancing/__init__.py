"""`rlhfspec bench rebalance`: the gain from moves."""
