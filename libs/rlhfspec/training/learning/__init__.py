"""From scored samples to gradients: pure functions of the sorted step, and the learner that applies them.

A step has n samples sorted by id with T response tokens in all: flat tensors `[T]` with `lengths` `[n]`."""
