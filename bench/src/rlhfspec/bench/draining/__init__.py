"""`rlhfspec bench drain`: a draining batch, watched step by step."""
