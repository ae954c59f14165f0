"""Commit of accepted tokens: sequence ends, table updates, and KV of accepted branches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from rlhfspec.common.arrays import IntArray
from rlhfspec.engine.base import FinishReason, Gain, TopLogProbs
from rlhfspec.engine.drafting.base import Forest
from rlhfspec.engine.drafting.tree import Walk
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.engine.scheduling import text
from rlhfspec.engine.scheduling.scheduler import StepRows
from rlhfspec.engine.scheduling.sequences import ACCEPTED, DRAFTED, VERIFICATIONS, RowTable
from rlhfspec.engine.scheduling.verify import Committed


def truncate(rows: RowTable, new: Committed) -> tuple[IntArray, dict[int, FinishReason]]:
    """Return the number of new tokens to keep per sequence, and why rows end: stop token, length, or broken logits."""
    columns = np.arange(new.tokens.shape[1], dtype=np.int32)
    valid = columns < new.counts[:, None]
    room = rows.limits[new.rows] - rows.lengths[new.rows]
    counts = np.minimum(new.counts, room)
    hits = (new.tokens[:, :, None] == rows.stop_ids[new.rows][:, None, :]).any(2) & valid
    first_stop = np.where(hits.any(1), hits.argmax(1) + 1, np.iinfo(np.int32).max)
    broken = ~new.finite & valid
    first_broken = np.where(broken.any(1), broken.argmax(1), np.iinfo(np.int32).max)
    kept = np.minimum(np.minimum(counts, first_stop), first_broken).astype(np.int32)
    reasons: dict[int, FinishReason] = {}
    for index in np.flatnonzero((first_stop <= counts) | (first_broken < counts) | (kept == room)):
        row = int(new.rows[index])
        if first_broken[index] < min(first_stop[index], counts[index]):
            reasons[row] = "error"
        elif first_stop[index] == kept[index]:
            reasons[row] = "stop"
        else:
            reasons[row] = "length"
    return kept, reasons


def append(rows: RowTable, new: Committed, kept: IntArray, version: int) -> None:
    columns = np.arange(new.tokens.shape[1], dtype=np.int32)
    sequence, column = np.nonzero(columns < kept[:, None])
    row = new.rows[sequence]
    position = rows.lengths[row] + column
    rows.tokens[row, position] = new.tokens[sequence, column]
    rows.log_probs[row, position] = new.log_probs[sequence, column]
    rows.tempered[row, position] = new.tempered[sequence, column]
    rows.versions[row, position] = version
    rows.lengths[new.rows] += kept


def keep_accepted(state: EngineState, step_rows: StepRows, walk: Walk, node_index: IntArray) -> None:
    """Move the slots of accepted nodes to their positions in the slot table, and count new KV.

    `node_index` [M] is each node's index within its sequence.
    """
    decode, space = step_rows.decode_rows, state.target
    lengths = state.rows.lengths[decode]
    for level in range(1, walk.path.shape[1]):
        sequences = np.flatnonzero(walk.path[:, level] >= 0)
        position = lengths[sequences] + level - 1
        held_at = lengths[sequences] + node_index[walk.path[sequences, level]]
        space.table.keep_path(decode[sequences], position, held_at)
    space.cached[decode] = lengths + walk.num_accepted
    space.cached[step_rows.prefill_rows] += step_rows.prefill_counts
    for row in step_rows.prefill_rows.tolist():
        space.mark_prefix(state.by_row[row])


def stop_at_strings(state: EngineState, new: Committed, kept: IntArray, reasons: dict[int, FinishReason]) -> None:
    rows = state.rows
    for index, row in enumerate(new.rows.tolist()):
        stops = state.by_row[row].request.params.stop
        if stops and state.tokenizer is not None:
            start, length = int(rows.prompt_lengths[row]), int(rows.lengths[row])
            response = np.concatenate((rows.tokens[row, start:length], new.tokens[index, : kept[index]]))
            found = text.first_stop(state.tokenizer, response, int(kept[index]), stops)
            if found is not None:
                kept[index] = found
                reasons[row] = "stop"


def count(rows: RowTable, decode_rows: IntArray, forest: Forest, new: Committed, kept: IntArray) -> None:
    rows.counters[new.rows, VERIFICATIONS] += kept > 0
    drafted = np.bincount(forest.sequence, minlength=len(decode_rows))
    rows.counters[decode_rows, DRAFTED] += drafted.astype(np.int32)
    rows.counters[new.rows, ACCEPTED] += np.maximum(kept - 1, 0)


class StepGains(Iterable[Gain]):
    """Tokens that sequences gained in a step, built on iteration."""

    def __init__(
        self,
        state: EngineState,
        new: Committed,
        kept: IntArray,
        reasons: Mapping[int, FinishReason],
        top: Mapping[int, tuple[TopLogProbs, ...]],
    ) -> None:
        rows, self._new, self._kept, self._top = new.rows.tolist(), new, kept, top
        self._ids = [state.by_row[row].request.id for row in rows]
        self._reasons = {rows.index(row): reason for row, reason in reasons.items()}

    def __iter__(self) -> Iterator[Gain]:
        new = self._new
        for index, (request_id, num_kept) in enumerate(zip(self._ids, self._kept.tolist(), strict=True)):
            yield Gain(
                id=request_id,
                token_ids=new.tokens[index, :num_kept],
                log_probs=new.log_probs[index, :num_kept],
                tempered_log_probs=new.tempered[index, :num_kept],
                finish_reason=self._reasons.get(index),
                top_log_probs=self._top.get(index, ()),
            )
