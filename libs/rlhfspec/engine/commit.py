"""Appending chosen tokens to the tables, and where a sequence ends."""

from __future__ import annotations

import numpy as np

from rlhfspec.drafting.base import IntArray
from rlhfspec.engine.base import FinishReason
from rlhfspec.engine.sequences import RowTable
from rlhfspec.engine.verify import Committed


def truncate(rows: RowTable, new: Committed) -> tuple[IntArray, dict[int, FinishReason]]:
    """How many of the new tokens count, and which rows end with them: stop token, length, or broken logits."""
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
    """Write the first `kept[s]` new tokens of every sequence behind what it has."""
    columns = np.arange(new.tokens.shape[1], dtype=np.int32)
    sequence, column = np.nonzero(columns < kept[:, None])
    row = new.rows[sequence]
    position = rows.lengths[row] + column
    rows.tokens[row, position] = new.tokens[sequence, column]
    rows.log_probs[row, position] = new.log_probs[sequence, column]
    rows.tempered[row, position] = new.tempered[sequence, column]
    rows.versions[row, position] = version
    rows.lengths[new.rows] += kept
