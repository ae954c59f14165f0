"""Hugging Face models on our kernels: their structure, and the proof that the engine computes the same."""
