"""From scored samples to gradients: pure functions of the sorted step, then the learner that applies them.

A step is ragged and flat: n samples sorted by id, T response tokens in all, tensors `[T]` with `lengths` `[n]`.
`algorithms` is the door: `prepare` makes the step's targets, `policy_terms` and `value_terms` a micro-batch's losses.
"""
