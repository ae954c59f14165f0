"""FlashAttention for long prompt chunks on a GPU, over keys copied from slots. Other rows use `tree_attention`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhfspec.common.arrays import IntArray
from rlhfspec.huggingface.structure.attention import AttentionSpec
from rlhfspec.kernels.attention_splits import SPLIT
from rlhfspec.kernels.flash import disagreement, flash_attention, why_not
from rlhfspec.kernels.tree_attention import AttentionMeta, tree_attention

LEAST_ROWS = 64  # of a chunk; shorter ones are faster in `tree_attention` and replay from a graph


@dataclass(frozen=True, slots=True)
class Chunks:
    """Prompt chunks of a forward: rows from `first_row` on, as runs of consecutive positions (here one, of 3 rows).

    >>> table = np.arange(12, dtype=np.int32).reshape(2, 6)
    >>> rows = [np.array(each, np.int32) for each in ([6, 2, 3, 4], [1, 0, 0, 0], [1, 3, 4, 5])]
    >>> meta = AttentionMeta(*rows, np.empty((4, 0), np.int32), table)
    >>> chunks = Chunks.of(meta, least_rows=3, most_keys=6)
    >>> chunks.first_row, chunks.starts.tolist(), chunks.lengths.tolist()
    (1, [0, 3], [5])
    """

    first_row: int
    starts: IntArray  # [C + 1] start of each run, counted from `first_row`
    table_rows: IntArray  # [C]
    lengths: IntArray  # [C] positions that the run's last row sees

    @classmethod
    def of(cls, meta: AttentionMeta, *, least_rows: int, most_keys: int) -> Chunks | None:
        """Return the runs from the first long one on; None without one, if a tree follows, or beyond `most_keys`."""
        rows, context, slots, extra = (
            np.asarray(each) for each in (meta.table_rows, meta.context_lens, meta.slots, meta.extra)
        )
        if len(rows) < least_rows:
            return None
        is_plain = (slots >= 0) & (extra < 0).all(1)
        goes_on = (rows[1:] == rows[:-1]) & (context[1:] == context[:-1] + 1) & is_plain[1:] & is_plain[:-1]
        borders = np.concatenate(([0], np.flatnonzero(~goes_on) + 1, [len(rows)])).astype(np.int32)
        is_long = np.diff(borders) >= least_rows
        first_row = borders[is_long.argmax()]
        borders = borders[is_long.argmax() :]
        lengths = context[borders[1:] - 1]
        if not is_long.any() or not is_plain[first_row:].all() or lengths.sum() > most_keys:
            return None
        return cls(int(first_row), borders - first_row, rows[borders[:-1]], lengths)

    @property
    def arrays(self) -> dict[str, IntArray]:
        return {"chunk_starts": self.starts, "chunk_table_rows": self.table_rows, "chunk_lengths": self.lengths}


@dataclass(frozen=True, slots=True)
class _Seen:
    starts: Tensor  # [C + 1] int32
    slots: Tensor  # [K] int64
    most: int


@dataclass(slots=True)
class ChunkedMeta(AttentionMeta):
    chunks: Chunks = field(kw_only=True)
    there: Mapping[str, Tensor] = field(kw_only=True)  # `Chunks.arrays`
    _before: AttentionMeta | None = field(default=None, init=False, repr=False, compare=False)
    _seen: dict[int | None, _Seen] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, meta: AttentionMeta, chunks: Chunks, device: torch.device) -> ChunkedMeta:
        indices = meta.tensors(device)
        there = {name: torch.as_tensor(array, device=device) for name, array in chunks.arrays.items()}
        return cls(
            indices.slots, indices.table_rows, indices.context_lens, indices.extra, indices.slot_table,
            chunks=chunks, there=there,
        )  # fmt: skip

    def before(self) -> AttentionMeta:
        if self._before is None:
            first = self.chunks.first_row
            self._before = AttentionMeta(
                self.slots[:first], self.table_rows[:first], self.context_lens[:first], self.extra[:first],
                self.slot_table,
            )  # fmt: skip
        return self._before

    def seen(self, window: int | None) -> _Seen:
        """Return the slots of the keys in each chunk's window, without waiting for the device."""
        if window not in self._seen:
            hidden = _hidden(self.chunks.starts, self.chunks.lengths, window)
            counts = self.chunks.lengths - hidden
            starts, lengths = self.there["chunk_starts"], self.there["chunk_lengths"]
            begins = _hidden(starts, lengths, window)
            key_starts = torch.nn.functional.pad((lengths - begins).cumsum(0, dtype=torch.int32), (1, 0))
            place = torch.arange(int(counts.sum()), dtype=torch.int32, device=starts.device)
            run = torch.searchsorted(key_starts[1:], place, right=True)
            positions = place + (begins - key_starts[:-1])[run]
            slots = torch.as_tensor(self.slot_table)[self.there["chunk_table_rows"].long()[run], positions.long()]
            self._seen[window] = _Seen(key_starts, slots.long(), int(counts.max()))
        return self._seen[window]


def _hidden(starts: Any, lengths: Any, window: int | None) -> Any:
    """Return, per chunk, the number of leading positions before the sliding windows of all its rows."""
    if window is None:
        return 0 * lengths
    return (lengths - (starts[1:] - starts[:-1]) + 1 - window).clip(0)


def chunk_attention(
    query: Tensor, key: Tensor, value: Tensor, kv: Tensor, layer: int, meta: ChunkedMeta,
    *, scale: float, sliding_window: int | None, split: int,
) -> Tensor:  # fmt: skip
    """Run FlashAttention for the chunks, and `tree_attention` for the rows before."""
    first, block_size = meta.chunks.first_row, kv.shape[3]
    numbers = kv.view(-1, *kv.shape[4:])  # [blocks x layers x 2 x block size, Hkv, D]

    def places(slots: Tensor) -> Tensor:
        block = slots // block_size * (kv.shape[1] * 2) + 2 * layer
        return block * block_size + slots % block_size

    own, seen = places(torch.as_tensor(meta.slots)[first:].long()), meta.seen(sliding_window)
    numbers.index_copy_(0, own, key[first:].to(kv.dtype))
    numbers.index_copy_(0, own + block_size, value[first:].to(kv.dtype))
    keys, most = places(seen.slots), int(np.diff(meta.chunks.starts).max())
    out = flash_attention(
        query[first:].to(kv.dtype), numbers.index_select(0, keys), numbers.index_select(0, keys + block_size),
        meta.there["chunk_starts"], seen.starts, most, seen.most, scale=scale, window=sliding_window,
    ).to(query.dtype)  # fmt: skip
    if not first:
        return out
    others = tree_attention(
        query[:first], key[:first], value[:first], kv, layer, meta.before(),
        scale=scale, sliding_window=sliding_window, split=split,
    )  # fmt: skip
    return torch.cat([others, out])


# ---- which attentions use FlashAttention -----------------------------------------------------------------------------


def why_ours(spec: AttentionSpec, kv: Tensor) -> str:
    """Return why our kernel, not FlashAttention, must run these chunks, or an empty string.

    FlashAttention must support the attention and agree with `tree_attention` on two test chunks.
    """
    reason = why_not(
        kv.device, kv.dtype, kv.shape[5], kv.shape[5], chunk=spec.chunk, softcap=spec.softcap, has_sinks=spec.has_sinks
    )
    if reason:
        return reason
    options: dict[str, Any] = {"scale": spec.scale, "sliding_window": spec.window, "split": SPLIT}
    table = np.random.default_rng(0).permutation(512).astype(np.int32).reshape(2, 256)
    counts, pasts = (LEAST_ROWS + 7, LEAST_ROWS), (0, 100)
    context = np.concatenate([np.arange(past, past + count) for past, count in zip(pasts, counts, strict=True)])
    rows = np.repeat(np.arange(2, dtype=np.int32), counts)
    meta = AttentionMeta(
        table[rows, context], rows, (context + 1).astype(np.int32), np.empty((len(rows), 0), np.int32), table
    )
    chunks = Chunks.of(meta, least_rows=LEAST_ROWS, most_keys=512)
    assert chunks is not None
    drawn = torch.Generator().manual_seed(0)
    q, k, v, small = (
        torch.randn(*shape, generator=drawn).to(kv.device, kv.dtype)
        for shape in (
            (len(rows), spec.num_heads, kv.shape[5]), *2 * ((len(rows), *kv.shape[4:]),), (32, 1, 2, 16, *kv.shape[4:]),
        )
    )  # fmt: skip
    return disagreement(
        lambda: chunk_attention(q, k, v, small.clone(), 0, ChunkedMeta.of(meta, chunks, kv.device), **options),
        lambda: tree_attention(q, k, v, small.clone(), 0, meta, **options),
    )


def told(reasons: Sequence[str]) -> str:
    """Describe which kernel runs prompt chunks, given each layer's reason against FlashAttention.

    >>> told(["", "FlashAttention does not support chunked attention"])
    'varlen_attn in 1 of 2 layers; FlashAttention does not support chunked attention'
    """
    refused = list(dict.fromkeys(filter(None, reasons)))
    if not refused:
        return "varlen_attn"
    num_taken = reasons.count("")
    which = f"varlen_attn in {num_taken} of {len(reasons)} layers; " if num_taken else "own kernel: "
    return which + ", ".join(refused)
