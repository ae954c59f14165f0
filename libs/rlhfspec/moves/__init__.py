"""Moves of in-flight sequences between generators: how (migration), and which and when (rebalancing)."""
