"""The model drafter keeps the drafter contract over a forward without a model."""

import numpy as np

from rlhfspec.common.arrays import FloatArray, Floats, IntArray
from rlhfspec.engine.drafting.base import DraftBatch, DraftPlan
from rlhfspec.engine.drafting.levels import LevelTerms
from rlhfspec.engine.drafting.model import DraftRows, Expanded, GrownTrees, ModelDrafter, Roots
from rlhfspec.testing.drafter import MOST_TOKENS, DrafterContract, DraftTable


class Successors:
    """`DraftEngine` in which the next numbers follow a token, the nearest with the best score."""

    def __init__(self, table: DraftTable, vocab_size: int = 7) -> None:
        self._vocab_size = vocab_size
        self.slots = np.arange(table.num_rows * MOST_TOKENS, dtype=np.int32).reshape(table.num_rows, MOST_TOKENS)
        self.capacity = np.full(table.num_rows, MOST_TOKENS, np.int32)
        self.cached = np.zeros(table.num_rows, np.int32)

    def candidates(self, rows: DraftRows, k: int) -> tuple[IntArray, FloatArray]:
        last = rows.tokens[rows.logit_rows]
        order = np.arange(k, dtype=np.int32)
        tokens = (last[:, None] + 1 + order) % self._vocab_size
        return tokens.astype(np.int32), np.broadcast_to(-order.astype(np.float32), tokens.shape)

    def grow(
        self, batch: DraftBatch, plan: DraftPlan, roots: Roots, curves: tuple[Floats, Floats], terms: LevelTerms | None
    ) -> GrownTrees | None:
        return None

    def keep(self, batch: DraftBatch, expanded: Expanded, new_lengths: IntArray) -> bool:
        return False

    def prefix_computed(self, row: int) -> None:
        """Return 0, as nothing is shared."""


class RestartedModelDrafter(ModelDrafter):
    """Drafter whose engine reports a row's cache when a sequence begins."""

    def start(self, row: int, tokens: IntArray, group: str, history: tuple[tuple[int, ...], ...]) -> None:
        super().start(row, tokens, group, history)
        self.engine.cached[row] = 0


class TestModelDrafter(DrafterContract):
    def make(self, table: DraftTable) -> ModelDrafter:
        return RestartedModelDrafter(Successors(table))
