"""From the trainer to the generators: versions of weights, put, announced, fetched."""

from rlhfspec.weights.base import StateDict, WeightStore, newest_kept
from rlhfspec.weights.file import FileWeightStore
from rlhfspec.weights.memory import MemoryWeightStore

__all__ = ["FileWeightStore", "MemoryWeightStore", "StateDict", "WeightStore", "newest_kept"]
