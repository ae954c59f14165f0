"""Learns from a step's samples as soon as the last of them is scored."""
