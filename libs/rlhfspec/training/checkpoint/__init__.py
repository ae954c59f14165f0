"""Checkpoints and export of the policy (docs/training.md)."""

from rlhfspec.training.checkpoint.export import export_hf
from rlhfspec.training.checkpoint.store import CheckpointStore

__all__ = ["CheckpointStore", "export_hf"]
