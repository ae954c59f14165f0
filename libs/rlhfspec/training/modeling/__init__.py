"""Models as trainer, reference and critic see them: packed forwards, log-probs of responses, values, digests."""
