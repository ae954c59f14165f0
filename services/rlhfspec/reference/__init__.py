"""The reference stage: log-probs of samples under the initial policy."""
