"""From rows to gradients to weights: data, packed models, scores, losses, checkpoints."""
