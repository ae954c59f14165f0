"""Paged tree attention on a GPU: the Triton kernels behind `tree_attention` (contract and twin are there).

One program serves one query row and the query heads of one kv head. It walks the row's positions in tiles whose borders
are multiples of the tile size, online softmax from tile to tile; whether a position's slot comes from the table or from
`extra` changes nothing but the place it is read from. Tile size and order depend on the model's geometry alone, so a
row gives the same bits in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlhfspec.kernels.attention_indices import AttentionIndices

TILE_ELEMENTS = 8192  # query heads x positions x head dim that one program holds in registers


def tree_attention(
    query: torch.Tensor,  # [N, H, D]
    key: torch.Tensor,  # [N, Hkv, D]
    value: torch.Tensor,  # [N, Hkv, D]
    kv: torch.Tensor,  # [blocks, layers, 2, block size, Hkv, D]
    layer: int,
    indices: AttentionIndices,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [H]
) -> torch.Tensor:
    """The arguments are checked by `rlhfspec.kernels.tree_attention.tree_attention`. Returns [N, H, D]."""
    num_rows, num_heads, dim = query.shape
    _, num_layers, _, block_size, num_kv_heads, _ = kv.shape
    extra, slot_table = indices.extra.contiguous(), indices.slot_table
    if slot_table.stride(1) != 1:
        slot_table = slot_table.contiguous()
    query, key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (query, key, value))
    out = torch.empty((num_rows, num_heads, dim), dtype=query.dtype, device=query.device)
    if num_rows == 0:
        return out
    plane = block_size * num_kv_heads * dim
    block_stride, first = num_layers * 2 * plane, layer * 2 * plane
    padded_dim = triton.next_power_of_2(dim)
    _write_kv_kernel[(num_rows, num_kv_heads)](
        key, value, kv, indices.slots,
        *key.stride()[:2], *value.stride()[:2], block_stride, plane, first, num_kv_heads,
        DIM=dim, PADDED_DIM=padded_dim, BLOCK_SIZE=block_size,
    )  # fmt: skip
    group = num_heads // num_kv_heads
    padded_group = triton.next_power_of_2(group)
    _attention_kernel[(num_rows, num_kv_heads)](
        query, kv, out, sinks, indices.table_rows, indices.context_lens, extra, slot_table,
        *query.stride()[:2], slot_table.stride(0), extra.shape[1], block_stride, plane, first, num_heads, num_kv_heads,
        scale, softcap, sliding_window or 0, chunk or 0,
        GROUP=group, PADDED_GROUP=padded_group, DIM=dim, PADDED_DIM=padded_dim, BLOCK_SIZE=block_size,
        PADDED_EXTRA=triton.next_power_of_2(max(extra.shape[1], 1)),
        TILE=min(64, max(8, TILE_ELEMENTS // (padded_group * padded_dim))),
        HAS_SOFTCAP=softcap > 0.0, HAS_SINKS=sinks is not None,
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _write_kv_kernel(  # type: ignore[no-untyped-def]
    key, value, kv, slots,
    key_row, key_head, value_row, value_head, block_stride, plane, first, num_kv_heads,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row).to(tl.int64)
    d = tl.arange(0, PADDED_DIM)
    there = (d < DIM) & (slot >= 0)
    target = kv + first + slot // BLOCK_SIZE * block_stride + (slot % BLOCK_SIZE * num_kv_heads + head) * DIM + d
    k = tl.load(key + row.to(tl.int64) * key_row + head * key_head + d, mask=there, other=0.0)
    v = tl.load(value + row.to(tl.int64) * value_row + head * value_head + d, mask=there, other=0.0)
    tl.store(target, k.to(kv.dtype.element_ty), mask=there)
    tl.store(target + plane, v.to(kv.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def _attention_kernel(  # type: ignore[no-untyped-def]
    query, kv, out, sinks, table_rows, context_lens, extra, slot_table,
    query_row, query_head, table_stride, extra_width, block_stride, plane, first, num_heads, num_kv_heads,
    scale, softcap, window, chunk,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PADDED_EXTRA: tl.constexpr, TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    g, d, t = tl.arange(0, PADDED_GROUP), tl.arange(0, PADDED_DIM), tl.arange(0, TILE)
    heads = kv_head * GROUP + g
    inside = (g < GROUP)[:, None] & (d < DIM)[None, :]
    # Everything is cast to float32 right after the load: bfloat16 arithmetic would round at every step.
    q = tl.load(query + row * query_row + heads[:, None] * query_head + d[None, :], mask=inside, other=0.0)
    q = q.to(tl.float32)  # [G, D]

    context = tl.load(context_lens + row)
    e = tl.arange(0, PADDED_EXTRA)
    extras = tl.load(extra + row * extra_width + e, mask=e < extra_width, other=-1)
    total = context + tl.sum((extras >= 0).to(tl.int32), axis=0)
    begin = tl.where(window > 0, tl.maximum(total - window, 0), 0)
    begin = tl.where(chunk > 0, (total - 1) // tl.maximum(chunk, 1) * chunk, begin)
    table = slot_table + tl.load(table_rows + row).to(tl.int64) * table_stride

    largest = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    weight_sum = tl.zeros([PADDED_GROUP], tl.float32)
    sums = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    for start in range(begin // TILE * TILE, total, TILE):
        p = start + t  # [T] positions
        seen = (p >= begin) & (p < total)
        in_table = tl.load(table + p, mask=seen & (p < context), other=0)
        in_extra = tl.load(extra + row * extra_width + p - context, mask=seen & (p >= context), other=0)
        slot = tl.where(p < context, in_table, in_extra).to(tl.int64)
        token = slot // BLOCK_SIZE * block_stride + (slot % BLOCK_SIZE * num_kv_heads + kv_head) * DIM
        place = kv + first + token[:, None] + d[None, :]  # [T, D]
        there = seen[:, None] & (d < DIM)[None, :]  # what is not seen may hold anything, NaN too: never loaded
        k = tl.load(place, mask=there, other=0.0).to(tl.float32)
        v = tl.load(place + plane, mask=there, other=0.0).to(tl.float32)
        scores = tl.sum(q[:, None, :] * k[None, :, :], axis=2) * scale  # [G, T]
        if HAS_SOFTCAP:
            scores = _tanh(scores / softcap) * softcap
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        shrink = tl.exp(largest - new_largest)
        weights = tl.exp(scores - new_largest[:, None])
        weight_sum = weight_sum * shrink + tl.sum(weights, axis=1)
        sums = sums * shrink[:, None] + tl.sum(weights[:, :, None] * v[None, :, :], axis=1)
        largest = new_largest

    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=g < GROUP, other=0.0).to(tl.float32)
        new_largest = tl.maximum(largest, sink)
        shrink = tl.exp(largest - new_largest)
        weight_sum = weight_sum * shrink + tl.exp(sink - new_largest)
        sums = sums * shrink[:, None]
    weight_sum = tl.where(total > 0, weight_sum, 1.0)  # a padding row sees nothing and gets zeros
    result = sums / weight_sum[:, None]
    place = out + (row * num_heads + heads[:, None]) * DIM + d[None, :]
    tl.store(place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    z = x * x  # near zero an odd polynomial, where 1 - 2 / (e^2x + 1) would lose its digits
    p = -5.70498872745e-3
    p = p * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    return tl.where(tl.abs(x) < 0.625, x + x * z * p, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
