"""`rlhfspec bench generate`: tokens per second of all modes and baselines."""
