"""The critic stage: expected value of a response at each token."""
