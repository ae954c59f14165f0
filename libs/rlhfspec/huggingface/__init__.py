"""Hugging Face models on rlhfspec's kernels, and the verification of equal results."""
