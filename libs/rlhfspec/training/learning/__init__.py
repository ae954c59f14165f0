"""From scored samples to gradients: n samples sorted by id with T response tokens, as flat tensors `[T]` with `lengths`
`[n]`."""
