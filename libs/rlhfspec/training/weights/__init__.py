"""Weight transfer from trainer to generators: versions are put, announced and fetched."""

from rlhfspec.training.weights.base import StateDict, WeightStore, newest_kept
from rlhfspec.training.weights.file import FileWeightStore
from rlhfspec.training.weights.memory import MemoryWeightStore

__all__ = ["FileWeightStore", "MemoryWeightStore", "StateDict", "WeightStore", "newest_kept"]
