"""`rlhfspec bench generate`: tokens a second of our modes and of others."""
