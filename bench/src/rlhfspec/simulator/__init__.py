"""Simulator of moves and pipelines on the plans that production runs: `rlhfspec simulate`."""
