"""Moves and pipelines simulated on the plans that production runs: `rlhfspec simulate`."""
