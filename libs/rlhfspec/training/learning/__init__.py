"""From scored samples to gradients: pure functions of the sorted step, then the learner that applies them.

A step is ragged and flat: n samples sorted by id, T response tokens in all, tensors `[T]` with `lengths` `[n]`.
`algorithms` is the entry point: `prepare` computes the step's targets, `policy_terms` and `value_terms` the losses of a
micro-batch.
"""
