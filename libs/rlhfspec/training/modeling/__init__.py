"""Models of the trainer, reference and critic: packed forwards, log-probs of responses, values and digests."""
