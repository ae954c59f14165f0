"""In-flight sequences move between generators: how (migration), and which and when (rebalancing)."""
