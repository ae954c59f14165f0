"""`rlhfspec bench rebalance`: what moves gain."""
