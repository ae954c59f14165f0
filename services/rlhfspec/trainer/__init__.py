"""The training stage: learns from a step's samples once all are scored."""
