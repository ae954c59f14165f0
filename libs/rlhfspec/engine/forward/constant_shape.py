"""Forwards of constant shape, because libraries choose the order of sums, and so a row's bits, by shape.

>>> batch = AttentionMeta(*(np.zeros(3, np.int32) for _ in range(3)), np.zeros((3, 0), np.int32),
...                       np.zeros((1, 4), np.int32))
>>> [(len(tokens), meta.slots[:4].tolist()) for tokens, _, meta in parts(np.arange(3), np.arange(3), batch)]
[(64, [0, 0, 0, -1])]
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from rlhfspec.kernels.tree_attention import AttentionMeta, IndexArray

ROWS = 64  # in graphs.ROW_BUCKETS, so that captured graphs have this shape too


def parts(
    tokens: IndexArray, positions: IndexArray, meta: AttentionMeta, num_rows: int = ROWS
) -> Iterator[tuple[IndexArray, IndexArray, AttentionMeta]]:
    for first in range(0, len(tokens), num_rows):
        part = slice(first, first + num_rows)
        yield (
            _filled(tokens[part], 0, num_rows),
            _filled(positions[part], 0, num_rows),
            AttentionMeta(
                slots=_filled(meta.slots[part], -1, num_rows), table_rows=_filled(meta.table_rows[part], 0, num_rows),
                context_lens=_filled(meta.context_lens[part], 0, num_rows),
                extra=_filled(meta.extra[part], -1, num_rows), slot_table=meta.slot_table,
            ),
        )  # fmt: skip


def rows_of(wanted: IndexArray, num_rows: int = ROWS) -> Iterator[tuple[IndexArray, int]]:
    """Yield parts of `wanted`, padded to `num_rows`, and each part's number of wanted rows."""
    for first in range(0, len(wanted), num_rows):
        part = wanted[first : first + num_rows]
        yield _filled(part, 0, num_rows), len(part)


def _filled(numbers: IndexArray, value: int, num_rows: int) -> IndexArray:
    shape = (num_rows, *numbers.shape[1:])
    filled = (
        numbers.new_full(shape, value) if isinstance(numbers, torch.Tensor) else np.full(shape, value, numbers.dtype)
    )
    filled[: len(numbers)] = numbers  # type: ignore[assignment]
    return filled
