"""One target forward: laying out roots, prompt chunks and trees as rows, and reading the choices back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfspec.drafting.base import BoolArray, FloatArray, Forest, IntArray
from rlhfspec.drafting.tree import Walk, ancestors
from rlhfspec.engine.cache import SlotTable
from rlhfspec.engine.runner import concatenate_ranges
from rlhfspec.engine.scheduler import Schedule
from rlhfspec.engine.sequences import RowTable
from rlhfspec.kernels.tree_attention import AttentionMeta


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyBatch:
    """Rows in order: roots of decoding sequences [B], prompt chunk tokens, tree nodes [M].

    Logits are wanted of roots, of the last token of chunks that complete a prompt [F], and of nodes, in that order.
    """

    tokens: IntArray  # [N]
    positions: IntArray  # [N]
    meta: AttentionMeta
    logit_rows: IntArray  # [B + F + M]
    sampled_rows: IntArray  # [B + F + M] table row of each wanted row
    noise_positions: IntArray  # [B + F + M] response position of the token chosen there
    finishing: IntArray  # [F] table rows whose prompt is complete after this forward
    node_index: IntArray  # [M] index of a node within its sequence: its slot is slots[length + index]


def lay_out(rows: RowTable, table: SlotTable, schedule: Schedule, forest: Forest, node_index: IntArray) -> VerifyBatch:
    """Flatten everything that runs in this step into one batch of rows."""
    decode = schedule.decode_rows
    lengths = rows.lengths[decode]
    member = np.repeat(schedule.prefill_rows, schedule.prefill_counts)
    chunk_positions = concatenate_ranges(schedule.prefill_starts, schedule.prefill_counts)
    node_rows = decode[forest.sequence]
    node_lengths = lengths[forest.sequence]

    table_rows = np.concatenate((decode, member, node_rows)).astype(np.int32)
    committed_rows = np.concatenate((decode, member))
    committed_positions = np.concatenate((lengths - 1, chunk_positions))
    positions = np.concatenate((committed_positions, node_lengths + forest.depth - 1)).astype(np.int32)
    slot_positions = np.concatenate((committed_positions, node_lengths + node_index))
    tokens = np.concatenate((rows.tokens[committed_rows, committed_positions], forest.token)).astype(np.int32)
    context_lens = np.concatenate((committed_positions + 1, node_lengths)).astype(np.int32)

    slots = table.slots[table_rows, slot_positions]
    num_committed = len(committed_rows)
    meta = AttentionMeta(
        slots=slots,
        table_rows=table_rows,
        context_lens=context_lens,
        extra=_ancestor_slots(forest, slots[num_committed:], num_committed),
        slot_table=table.slots,
    )
    ends = schedule.prefill_starts + schedule.prefill_counts
    complete = ends == rows.lengths[schedule.prefill_rows]
    finishing = schedule.prefill_rows[complete]
    last_of_chunk = len(decode) + np.cumsum(schedule.prefill_counts)[complete] - 1
    sampled_rows = np.concatenate((decode, finishing, node_rows)).astype(np.int32)
    depth = np.concatenate((np.zeros(len(decode) + len(finishing), np.int32), forest.depth))
    return VerifyBatch(
        tokens=tokens,
        positions=positions,
        meta=meta,
        logit_rows=np.concatenate(
            (np.arange(len(decode)), last_of_chunk, np.arange(num_committed, len(tokens)))
        ).astype(np.int32),
        sampled_rows=sampled_rows,
        noise_positions=(rows.lengths[sampled_rows] - rows.prompt_lengths[sampled_rows] + depth).astype(np.int32),
        finishing=finishing,
        node_index=node_index,
    )


def _ancestor_slots(forest: Forest, node_slots: IntArray, num_committed: int) -> IntArray:
    """[N, D] slots of a node's drafted ancestors and itself, -1 padded; all -1 for rows that are no nodes."""
    paths = ancestors(forest)  # [M, D]
    extra = np.full((num_committed + forest.size, paths.shape[1]), -1, np.int32)
    if forest.size:
        extra[num_committed:] = np.where(paths >= 0, node_slots[paths], -1)
    return extra


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """New tokens of S sequences (decoding ones first, then those whose prompt is complete), up to D+1 each."""

    rows: IntArray  # [S] table rows
    tokens: IntArray  # [S, D+1]
    log_probs: FloatArray  # [S, D+1]
    tempered: FloatArray  # [S, D+1]
    finite: BoolArray  # [S, D+1]
    counts: IntArray  # [S] valid columns


def gather(batch: VerifyBatch, walk: Walk, num_decode: int, sample: tuple[IntArray, FloatArray, FloatArray, BoolArray],
           ) -> Committed:  # fmt: skip
    """Read the target's choice after the root and after every accepted node."""
    tokens, log_probs, tempered, finite = sample
    num_first = len(batch.finishing)
    first_node = num_decode + num_first
    path = np.full((first_node, walk.path.shape[1]), 0, np.int64)
    path[:, 0] = np.arange(first_node)
    path[:num_decode, 1:] = np.where(walk.path[:, 1:] >= 0, walk.path[:, 1:] + first_node, 0)
    counts = np.ones(first_node, np.int32)
    counts[:num_decode] += walk.num_accepted
    return Committed(
        rows=batch.sampled_rows[:first_node],
        tokens=tokens[path],
        log_probs=log_probs[path],
        tempered=tempered[path],
        finite=finite[path],
        counts=counts,
    )
