"""Hugging Face models on rlhfspec's kernels, and the proof of equal results."""
