"""Attention of a packed row in one FlashAttention call, on a GPU in 16 bits.

The plain torch twin in `packed` runs on other devices and types, or if a small test row's results differ.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from rlhfspec.huggingface.structure.attention import AttentionSpec
from rlhfspec.kernels.flash import disagreement, flash_attention, why_not

log = logging.getLogger("rlhfspec.training.modeling")
Twin = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class RowPart:
    """Contiguous tokens of a row: a sequence, a shared prompt, or one of its answers."""

    length: int
    behind: int | None = None  # index of the part with the prompt that this answer continues


@dataclass(frozen=True, slots=True)
class _Layout:
    starts: Tensor  # [n + 1]
    key_starts: Tensor  # [n + 1]
    most: int
    most_keys: int
    keys: Tensor | None


@functools.lru_cache(maxsize=8)  # all layers of a row share a layout
def layout_of(parts: tuple[RowPart, ...], device: torch.device) -> _Layout:
    lengths = [part.length for part in parts]
    starts = [0, *accumulate(lengths)]
    places: list[int] = []
    key_starts = [0]
    for place, part in enumerate(parts):
        if part.behind is not None:
            places.extend(range(starts[part.behind], starts[part.behind + 1]))
        places.extend(range(starts[place], starts[place + 1]))
        key_starts.append(len(places))

    def there(numbers: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(numbers, dtype=dtype).to(device)

    return _Layout(
        starts=there(starts), key_starts=there(key_starts), most=max(lengths),
        most_keys=max(stop - start for start, stop in pairwise(key_starts)),
        keys=None if len(places) == starts[-1] else there(places, torch.int64),
    )  # fmt: skip


def takes(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, twin: Twin) -> bool:
    """Return whether `attention` supports query [1, H, T, D], key/value [1, Hkv, T, D]."""
    dtype, dim = computed_in(query), query.shape[3]
    if dim != key.shape[3] or why_not(query.device, dtype, dim, value.shape[3], chunk=spec.chunk):
        return False
    return agrees(query.device, dtype, query.shape[1], key.shape[1], dim, spec.window is not None, twin)


def computed_in(query: Tensor) -> torch.dtype:
    kind = query.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype


def attention(
    query: Tensor, key: Tensor, value: Tensor, parts: tuple[RowPart, ...], spec: AttentionSpec, scale: float
) -> Tensor:
    """Compute `packed.row_attention` in one call: -> [1, T, H, D]."""
    layout, dtype = layout_of(parts, query.device), computed_in(query)
    rows, keys, values = (states[0].transpose(0, 1).to(dtype) for states in (query, key, value))  # [T, heads, D]
    if layout.keys is not None:  # index_select's backward would add up a key's gradients in any order
        keys, values = (
            torch.nn.functional.embedding(layout.keys, states.flatten(1)).view(-1, *states.shape[1:])
            for states in (keys, values)
        )
    out = flash_attention(
        rows, keys, values, layout.starts, layout.key_starts, layout.most, layout.most_keys, scale=scale,
        window=spec.window,
    )  # fmt: skip
    return out[None]


@functools.cache
def agrees(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int, has_window: bool, twin: Twin
) -> bool:
    """Return whether `attention` matches the twin on a small test row."""
    parts = (RowPart(5), RowPart(40), RowPart(3, 1), RowPart(17, 1), RowPart(1))
    spec = AttentionSpec(
        index=0, num_heads=heads, num_kv_heads=kv_heads, key_dim=dim, value_dim=dim, scale=dim**-0.5, softcap=0.0,
        has_sinks=False, window=16 if has_window else None, chunk=None,
    )  # fmt: skip
    drawn = torch.Generator().manual_seed(0)
    count = sum(part.length for part in parts)
    q, k, v = (
        torch.randn(1, each, count, dim, generator=drawn).to(device, dtype) for each in (heads, kv_heads, kv_heads)
    )
    wrong = disagreement(
        lambda: attention(q, k, v, parts, spec, dim**-0.5), lambda: twin(q, k, v, parts, spec, dim**-0.5)
    )
    if wrong:
        kind = f"{heads} heads of size {dim} and {kv_heads} KV heads in {str(dtype).removeprefix('torch.')}"
        log.warning("attention with %s runs one sequence at a time: %s", kind, wrong)
    return not wrong
