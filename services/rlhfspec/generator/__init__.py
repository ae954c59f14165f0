"""Samples every prompt, on the engine."""
