"""Training: data, models, scoring, losses, checkpoints and weight transfer."""
