"""Reference implementation of `tree_attention`: one row at a time, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from rlhfspec.kernels.attention_splits import SPLIT, merge_reference


@dataclass(frozen=True, slots=True)
class AttentionIndices:
    """Indices of an `AttentionMeta` as int32 tensors on the query's device."""

    slots: torch.Tensor  # [N]
    table_rows: torch.Tensor  # [N]
    context_lens: torch.Tensor  # [N]
    extra: torch.Tensor  # [N, E]
    slot_table: torch.Tensor  # [R, L]


class Meta(Protocol):
    def tensors(self, device: torch.device) -> AttentionIndices: ...


def tree_attention_reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, layer: int, meta: Meta,
    *, scale: float, sliding_window: int | None = None, chunk: int | None = None, softcap: float = 0.0,
    sinks: torch.Tensor | None = None, split: int = SPLIT,
) -> torch.Tensor:  # fmt: skip
    """Compute `tree_attention` row by row in float32, or float64 for float64 queries."""
    indices = meta.tensors(query.device)
    write_kv_reference(key, value, kv, layer, indices.slots)
    twin = _Twin(query, kv, layer, scale, softcap)
    out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
    for row in ((indices.context_lens > 0) | (indices.extra >= 0).any(1)).nonzero().flatten().tolist():  # no padding
        begin, slots = visible_slots(indices, row, sliding_window, chunk)
        last = begin + len(slots) - 1
        if begin // split == last // split:
            scores, values = twin.scores(row, slots)  # [H, T], [T, H, D]
            if sinks is not None:
                scores = torch.cat([scores, sinks.to(scores.dtype)[:, None]], dim=1)
            weights = torch.softmax(scores, dim=1)[:, : len(slots)]
            result = torch.einsum("ht,thd->hd", weights, values)
        else:
            splits = range(last // split + 1)
            result = merge_reference(twin.partials(row, begin, slots, splits, split), sinks)
        out[row] = result.to(query.dtype)
    return out


@dataclass(frozen=True, slots=True)
class _Twin:
    query: torch.Tensor  # [N, H, D]
    kv: torch.Tensor
    layer: int
    scale: float
    softcap: float

    def scores(self, row: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a row's scores [H, T] with the keys in slots [T], and their values [T, H, D]."""
        dtype = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        groups = self.query.shape[1] // self.kv.shape[4]
        keys, values = _gather(self.kv, self.layer, slots, dtype, groups)  # [T, H, D] each
        scores = torch.einsum("hd,thd->ht", self.query[row].to(dtype), keys) * self.scale
        return (torch.tanh(scores / self.softcap) * self.softcap if self.softcap else scores), values

    def partials(self, row: int, begin: int, slots: torch.Tensor, splits: range, split: int) -> torch.Tensor:
        """Return splits [H, n, 2 + D] for `merge_reference`, over visible `slots` that start at position `begin`."""
        parts = []
        for index in splits:
            borders = (index * split, (index + 1) * split)
            first, stop = (min(max(position - begin, 0), len(slots)) for position in borders)
            scores, values = self.scores(row, slots[first:stop])
            largest = scores.amax(1, keepdim=True) if first < stop else scores.new_full((len(scores), 1), -torch.inf)
            weights = torch.exp(scores - largest)
            sums = torch.einsum("ht,thd->hd", weights, values)
            parts.append(torch.cat([largest, weights.sum(1, keepdim=True), sums], dim=1))
        return torch.stack(parts, dim=1)


def visible_slots(
    indices: AttentionIndices, row: int, sliding_window: int | None, chunk: int | None = None
) -> tuple[int, torch.Tensor]:
    """Return the first position that a row attends to, and the KV slots [T] from there to the row itself."""
    context = indices.slot_table[indices.table_rows[row], : indices.context_lens[row]]
    extra = indices.extra[row]
    slots = torch.cat([context, extra[extra >= 0]])
    begin = 0
    if chunk is not None and len(slots):
        begin = (len(slots) - 1) // chunk * chunk
    if sliding_window is not None:
        begin = max(len(slots) - sliding_window, 0)
    return begin, slots[begin:]


def write_kv_reference(
    key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, layer: int, slots: torch.Tensor
) -> None:
    rows = torch.nonzero(slots >= 0).flatten()
    block, offset = _places(kv, slots[rows])
    kv[block, layer, 0, offset] = key[rows].to(kv.dtype)
    kv[block, layer, 1, offset] = value[rows].to(kv.dtype)


def _gather(
    kv: torch.Tensor, layer: int, slots: torch.Tensor, dtype: torch.dtype, groups: int
) -> tuple[torch.Tensor, torch.Tensor]:
    block, offset = _places(kv, slots)
    both = kv[block, layer, :, offset].to(dtype).repeat_interleave(groups, dim=2)  # [T, 2, H, D]
    return both[:, 0], both[:, 1]


def _places(kv: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    block_size = kv.shape[3]
    slots = slots.long()
    return slots // block_size, slots % block_size
