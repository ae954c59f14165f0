"""`rlhfspec bench migrate`: the cost of moves."""
