"""KV spaces of an engine: paged caches of models over the engine's blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlhfspec.common.arrays import BoolArray, IntArray
from rlhfspec.engine.base import Bytes
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.forward.chunks import ChunkedMeta
from rlhfspec.engine.forward.runner import ModelRunner
from rlhfspec.engine.forward.staging import Staging
from rlhfspec.engine.kv.cache import RestingKV, SlotTable
from rlhfspec.engine.scheduling.sequences import Sequence
from rlhfspec.kernels.tree_attention import AttentionMeta


class KVSpace:
    """Paged KV cache of one model over the engine's blocks. `cached[row]` counts a row's valid positions."""

    def __init__(self, runner: ModelRunner, config: EngineConfig) -> None:
        self.runner = runner
        self.table = SlotTable(config.max_sequences, config.table_width, config.block_size)
        self.cached: IntArray = np.zeros(config.max_sequences, np.int32)  # leading positions whose KV is valid
        self.filled: BoolArray = np.zeros(config.num_blocks, np.bool_)  # blocks whose part of a prompt is computed
        self._copied: list[tuple[Sequence, int]] = []  # with the block to copy its tail from
        self.staging = Staging(runner.config.device)
        self._table_there: torch.Tensor | None = None  # the device's copy of the slot table

    @property
    def bytes_per_position(self) -> int:
        """Return the KV bytes per position, over all ranks of the model."""
        others = self.runner.others
        return self.runner.bytes_per_position * (1 if others is None else others.num_processes)

    def stage(self, meta: AttentionMeta, **arrays: Any) -> tuple[AttentionMeta, dict[str, Any]]:
        """Return `meta` and `arrays`, copied to the model's device unless several processes share the model."""
        if self.runner.config.device.type == "cpu" or self.runner.others is not None:
            return meta, arrays
        indices = {name: getattr(meta, name) for name in ("slots", "table_rows", "context_lens", "extra")}
        places, slots = self.table.take_changed()
        chunks = self.runner.chunks_of(meta)
        told = {"places": places, "changed": slots, **indices, **(chunks.arrays if chunks else {})}
        given = self.staging.up(told | arrays)
        if self._table_there is None:
            self._table_there = given["changed"].new_zeros(self.table.slots.shape)
        self._table_there.view(-1).index_copy_(0, given["places"].long(), given["changed"])
        there = {name: given[name] for name in indices} | {"slot_table": self._table_there}
        if chunks is not None:
            return ChunkedMeta(**there, chunks=chunks, there=given), given
        return AttentionMeta(**there), given

    def enter(self, sequence: Sequence) -> None:
        self.table.append(sequence.row, sequence.blocks)
        shared = sequence.blocks[: sequence.num_shared_blocks]
        self.cached[sequence.row] = self.num_filled(shared) * self.table.block_size

    def grow(self, row: int, blocks: list[int]) -> None:
        self.table.append(row, blocks)
        self.filled[blocks] = False

    def num_filled(self, blocks: list[int]) -> int:
        """Return how many of the blocks, from the first, hold computed prompt KV."""
        filled = self.filled[blocks]
        return len(blocks) if filled.all() else int(filled.argmin())

    def leave(self, row: int) -> None:
        self.table.clear(row)
        self.cached[row] = 0

    def rest(self, row: int, num_tokens: int) -> RestingKV:
        """Return the row's slots and valid KV, up to `num_tokens`, for `resume`."""
        slots = self.table.slots[row, : self.table.capacity[row]].copy()
        return RestingKV(slots, min(int(self.cached[row]), num_tokens))

    def resume(self, row: int, resting: RestingKV, num_tokens: int) -> None:
        self.table.hold(row, resting.slots)
        self.cached[row] = min(resting.num_cached, num_tokens - 1)

    def copy_later(self, sequence: Sequence, block: int) -> None:
        """Schedule a copy of the prompt's partial last block from `block`, before any later write."""
        if self.cached[sequence.row] == len(sequence.prefix.hashes) * self.table.block_size:
            self.cached[sequence.row] = sequence.prefix.num_tokens
            self._copied.append((sequence, block))

    def copy_tails(self) -> None:
        if not self._copied:
            return
        size, tails = self.table.block_size, [(each.prefix, each, block) for each, block in self._copied]
        from_slots = [np.arange(prefix.num_tail) + block * size for prefix, _, block in tails]
        to_slots = [self.table.slots[each.row, prefix.num_tokens - prefix.num_tail : prefix.num_tokens]
                    for prefix, each, _ in tails]  # fmt: skip
        self.runner.copy(*(np.concatenate(slots).astype(np.int32) for slots in (from_slots, to_slots)))
        for sequence, _ in self._copied:
            self.mark_prefix(sequence)
        self._copied.clear()

    def read(self, row: int, first: int, out: Bytes) -> None:
        if len(out):
            self.runner.read(self.table.slots[row, first : first + len(out)], out)

    def write(self, row: int, first: int, kv: Bytes) -> None:
        assert first == self.cached[row], "a gap in the KV"
        if len(kv):
            self.runner.write(self.table.slots[row, first : first + len(kv)], kv)
            self.cached[row] = first + len(kv)

    def mark_prefix(self, sequence: Sequence, *, first: int = 0) -> None:
        prefix, cached = sequence.prefix, int(self.cached[sequence.row])
        whole = cached // self.table.block_size
        self.filled[sequence.blocks[first : min(whole, len(prefix.hashes))]] = True
        if prefix.num_tail and cached >= prefix.num_tokens:
            self.filled[sequence.blocks[len(prefix.hashes)]] = True


class SharedSpace:
    """View of the target's KV for a drafter that shares it, and writes only after the verified tokens."""

    def __init__(self, target: KVSpace, runner: ModelRunner) -> None:
        self.runner = runner
        self.table, self.staging, self.stage, self.mark_prefix = (
            target.table, target.staging, target.stage, target.mark_prefix,
        )  # fmt: skip
        self._target = target

    @property
    def cached(self) -> IntArray:
        """Return a copy of the target's, because drafted KV does not count there."""
        return self._target.cached.copy()
