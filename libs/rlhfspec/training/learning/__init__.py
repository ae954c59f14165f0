"""Learning from scored samples: n samples sorted by id, and flat tensors `[T]` of T response tokens."""
