"""Simulator of moves, with production's planner, and of pipelines: `rlhfspec simulate`."""
