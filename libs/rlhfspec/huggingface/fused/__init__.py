"""Kernels under an unmodified Hugging Face model, and guards of row invariance."""
