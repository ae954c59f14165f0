"""`rlhfspec bench drift`: a trained policy with a frozen and a learning drafter."""
