"""Sample scores: rewards, reference log-probs, critic values. Each depends on its sample alone."""
