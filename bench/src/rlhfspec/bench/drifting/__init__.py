"""`rlhfspec bench drift`: a policy that is trained, its drafter left as it was and trained with it."""
