"""`rlhfspec bench migrate`: what a move costs."""
