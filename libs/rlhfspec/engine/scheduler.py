"""Who runs in this step: admission by free blocks, chunks of prompts, room for trees, preemption when short.

By the law none of these choices can change a token; they only decide when it appears.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlhfspec.drafting.base import IntArray
from rlhfspec.engine.cache import BlockPool, SlotTable
from rlhfspec.engine.sequences import RowTable, Sequence

_RUNNING_PER_SPARE_BLOCK = 4  # blocks left free at admission, so that a newcomer is not preempted at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Rows of this step. A decoding row has exactly one token without KV; a prefilling row gets a chunk."""

    decode_rows: IntArray  # [B]
    prefill_rows: IntArray  # [P]
    prefill_starts: IntArray  # [P] first position of the chunk
    prefill_counts: IntArray  # [P]

    @property
    def num_prefill_tokens(self) -> int:
        return int(self.prefill_counts.sum())

    @property
    def empty(self) -> bool:
        return not len(self.decode_rows) and not len(self.prefill_rows)


class Scheduler:
    """Owns the queue, the rows and the blocks."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        rows: RowTable,
        tables: list[SlotTable],
        prefill_chunk: int,
        prefix_sharing: bool,
        on_start: Callable[[Sequence], None],
        on_leave: Callable[[Sequence], None],
    ) -> None:
        self.pool = pool
        self.rows = rows
        self.tables = tables  # target and draft namespaces: the same blocks, each its own permutation
        self.prefill_chunk = prefill_chunk
        self.prefix_sharing = prefix_sharing
        self.on_start = on_start
        self.on_leave = on_leave
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission; the youngest is preempted first
        self.num_preemptions = 0

    def admit(self) -> None:
        """Take waiting sequences while rows and blocks last. One whose shared prefix is still being computed
        by a sibling waits for it rather than compute it twice; others may pass it."""
        passed: list[Sequence] = []
        while self.waiting and self.rows.free_rows:
            sequence = self.waiting.popleft()
            shared, pending = self._shareable(sequence)
            if pending:
                passed.append(sequence)
                continue
            need = self.pool.blocks_for(len(sequence.progress.token_ids) + 1) - len(shared)
            spare = len(self.running) // _RUNNING_PER_SPARE_BLOCK
            if need + spare > self.pool.num_free:
                passed.append(sequence)
                break
            self._start(sequence, shared, need)
        self.waiting.extendleft(reversed(passed))

    def schedule(self) -> Schedule:
        active = np.fromiter((sequence.row for sequence in self.running), np.int32, len(self.running))
        missing = self.rows.lengths[active] - self.rows.cached[active]
        prefill = active[missing > 1]
        counts = missing[missing > 1]
        before = np.cumsum(counts) - counts
        counts = np.minimum(counts, np.maximum(self.prefill_chunk - before, 0)).astype(np.int32)
        prefill, counts = prefill[counts > 0], counts[counts > 0]
        return Schedule(
            decode_rows=active[missing == 1],
            prefill_rows=prefill,
            prefill_starts=self.rows.cached[prefill].copy(),
            prefill_counts=counts,
        )

    def make_room(self) -> None:
        """Every running row gets a slot for its next token; the youngest give way when blocks run out."""
        for sequence in list(self.running):
            while sequence.row >= 0 and self.tables[0].capacity[sequence.row] < self.rows.lengths[sequence.row] + 1:
                if self.pool.num_free:
                    self._grow(sequence, 1)
                else:
                    self.preempt(self.running[-1])

    def make_tree_room(self, decode_rows: IntArray, slots_wanted: int) -> None:
        """Spare blocks for tree nodes, only from what is free: speculation never evicts anyone."""
        short = self.tables[0].capacity[decode_rows] - self.rows.lengths[decode_rows] < slots_wanted
        if not short.any():
            return
        needy = set(decode_rows[short].tolist())
        width = self.tables[0].slots.shape[1]
        for sequence in self.running:
            if sequence.row in needy:
                capacity, length = int(self.tables[0].capacity[sequence.row]), int(self.rows.lengths[sequence.row])
                blocks = self.pool.blocks_for(min(length + slots_wanted, width) - capacity)
                blocks = min(blocks, self.pool.num_free, (width - capacity) // self.pool.block_size)
                if blocks > 0:
                    self._grow(sequence, blocks)

    def preempt(self, sequence: Sequence) -> None:
        """Take the memory back; the sequence recomputes its KV later and, by the law, goes on with the same tokens."""
        self.rows.counters[sequence.row, 3] += 1
        self.num_preemptions += 1
        self.remove(sequence)
        self.waiting.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Out of its row and blocks; the progress stays in the sequence object."""
        self.on_leave(sequence)
        for table in self.tables:
            table.clear(sequence.row)
        self.rows.leave(sequence)
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_shared_blocks = [], 0
        self.running.remove(sequence)

    def place(self, sequence: Sequence) -> bool:
        """Give a row and private blocks to a sequence that brings its own KV; False when there is no room."""
        need = self.pool.blocks_for(len(sequence.progress.token_ids) + 1)
        if not self.rows.free_rows or need > self.pool.num_free:
            return False
        self._start(sequence, [], need)
        return True

    def mark_prefilled(self, sequence: Sequence) -> None:
        """Whole prompt blocks whose KV is now complete may be shared."""
        whole = int(self.rows.cached[sequence.row]) // self.pool.block_size
        for block in sequence.blocks[: min(whole, len(sequence.prefix_hashes))]:
            self.pool.mark_filled(block)

    def _shareable(self, sequence: Sequence) -> tuple[list[int], bool]:
        """Leading blocks that siblings hold filled, and whether the next one is being filled right now."""
        shared: list[int] = []
        if not self.prefix_sharing:
            return shared, False
        for prefix_hash in sequence.prefix_hashes:
            entry = self.pool.shared.get(prefix_hash)
            if entry is None:
                break
            if not entry.filled:
                return shared, True
            shared.append(entry.block)
        return shared, False

    def _start(self, sequence: Sequence, shared: list[int], need: int) -> None:
        self.pool.retain(shared)
        sequence.blocks, sequence.num_shared_blocks = list(shared), len(shared)
        row = self.rows.enter(sequence)
        for table in self.tables:
            table.append(row, shared)
        self.running.append(sequence)
        self._grow(sequence, need)
        self.rows.cached[row] = len(shared) * self.pool.block_size
        if self.prefix_sharing:
            for prefix_hash, block in zip(sequence.prefix_hashes, sequence.blocks, strict=False):
                self.pool.register(prefix_hash, block)
        self.on_start(sequence)

    def _grow(self, sequence: Sequence, count: int) -> None:
        blocks = self.pool.allocate(count)
        sequence.blocks.extend(blocks)
        for table in self.tables:
            table.append(sequence.row, blocks)
