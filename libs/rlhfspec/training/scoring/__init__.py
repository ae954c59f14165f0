"""Scores of samples: rewards, reference log-probs, critic values. Each number depends on the sample alone."""
