"""Hugging Face models on our kernels, and the proof that both compute the same."""
