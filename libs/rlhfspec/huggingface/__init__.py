"""Hugging Face models under our kernels: what they do, and the proof that the engine does the same."""
