"""What scores a sample: rewards, reference log-probs, critic values. Each number depends on the sample alone."""
