"""Draft model forwards in their own KV space, and whole trees in one native call."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rlhfspec.common.arrays import FloatArray, Floats, IntArray
from rlhfspec.engine.drafting.base import DraftBatch, DraftPlan, Forest
from rlhfspec.engine.drafting.levels import LevelTerms
from rlhfspec.engine.drafting.model import DraftEngine, DraftRows, Expanded, GrownTrees, Roots
from rlhfspec.engine.kv.space import KVSpace, SharedSpace
from rlhfspec.engine.scheduling.sequences import Sequence
from rlhfspec.kernels import draft, gumbel
from rlhfspec.kernels.draft import NativeDraft
from rlhfspec.kernels.tree_attention import AttentionMeta


class InSpace(DraftEngine):
    """Base of forwards over the slots of a KV space."""

    def __init__(self, space: KVSpace | SharedSpace) -> None:
        self._space = space

    @property
    def slots(self) -> IntArray:
        return self._space.table.slots

    @property
    def capacity(self) -> IntArray:
        return self._space.table.capacity

    @property
    def cached(self) -> IntArray:
        return self._space.cached


class DraftForward(InSpace):
    def __init__(self, space: KVSpace | SharedSpace, by_row: Mapping[int, Sequence]) -> None:
        super().__init__(space)
        self._by_row = by_row
        self._native: NativeDraft | None = None

    def candidates(self, rows: DraftRows, k: int) -> tuple[IntArray, FloatArray]:
        meta = AttentionMeta(
            slots=rows.slots, table_rows=rows.table_rows, context_lens=rows.context_lens,
            extra=rows.extra, slot_table=self.slots,
        )  # fmt: skip
        meta, given = self._space.stage(
            meta, tokens=rows.tokens, positions=rows.positions, logit_rows=rows.logit_rows, seeds=rows.seeds,
            noise_positions=rows.noise_positions, temperatures=rows.temperatures,
        )  # fmt: skip
        logits = self._space.runner.forward(given["tokens"], given["positions"], meta, given["logit_rows"])
        if not len(rows.logit_rows):
            return np.empty((0, k), np.int32), np.empty((0, k), np.float32)
        drawn = gumbel.candidates(logits, given["seeds"], given["noise_positions"], given["temperatures"], k)
        tokens, scores = self._space.staging.down(drawn)
        return tokens, scores

    def grow(
        self, batch: DraftBatch, plan: DraftPlan, roots: Roots, curves: tuple[Floats, Floats], terms: LevelTerms | None
    ) -> GrownTrees | None:
        native = self._native_draft()
        if native is None:
            return None
        log_odds, shifts = curves
        grown = native.grow(
            rows=batch.rows, lengths=batch.lengths, prompt_lengths=batch.prompt_lengths, room=batch.room,
            seeds=batch.seeds, temperatures=batch.temperatures, shifts=shifts,
            capacity=self.capacity, slot_table=self.slots,
            roots=roots.sequence, tokens=roots.tokens, scores=roots.scores, log_odds=log_odds,
            depth=plan.depth, width=plan.width, branch=plan.branch, terms=terms,
        )  # fmt: skip
        sequence, parent, depth, token, rank = grown.nodes
        gap, path_acceptance = grown.chances
        forest = Forest(
            sequence=sequence, parent=parent, depth=depth, token=token, rank=rank,
            gap=gap, path_acceptance=path_acceptance,
        )  # fmt: skip
        return GrownTrees(forest, Expanded(grown.expanded, grown.level_rows))

    def keep(self, batch: DraftBatch, expanded: Expanded, new_lengths: IntArray) -> bool:
        if isinstance(self._space, SharedSpace):
            return True  # the verification wrote it
        sequence, _, _, held_at = expanded.nodes  # entries that may be swapped, natively or by `keep_drafted`
        self._space.table.changes(batch.rows[sequence], held_at)
        return draft.keep(
            expanded.nodes, expanded.level_rows, rows=batch.rows, lengths=batch.lengths, new_lengths=new_lengths,
            tokens=batch.tokens, slot_table=self.slots, cached=self.cached,
        )  # fmt: skip

    def prefix_computed(self, row: int) -> None:
        self._space.mark_prefix(self._by_row[row])

    def _native_draft(self) -> NativeDraft | None:
        decoder = self._space.runner.native
        if decoder is not None and (self._native is None or self._native.decoder is not decoder):
            self._native = NativeDraft(decoder)
        return self._native if decoder is not None else None
