"""Triton kernels behind `tree_attention`.

A program serves up to ROWS neighbouring rows of a sequence, one kv head and one split. Tree nodes run row by row,
because they share positions. Tile sizes depend on the model alone, so a row has the same bits in every batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rlhfspec.kernels.tree_attention_twin import AttentionIndices

WARPS = 8
MOST_PARTIAL_BYTES = 1 << 26  # of unmerged splits; limits the rows per pass


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
    split: int,
) -> torch.Tensor:
    _write_kv(key, value, kv, layer, indices.slots)
    num_rows, num_heads, dim = query.shape
    room = indices.slot_table.shape[1] + indices.extra.shape[1]  # an upper bound; only the device knows the lengths
    num_splits = triton.cdiv(room, split)
    if num_splits <= 1:
        out = torch.empty((num_rows, num_heads, dim), dtype=query.dtype, device=query.device)
        _attend(query, kv, layer, indices, out, None, scale, sliding_window, chunk, softcap, sinks, split)
        return out
    rows = max(1, MOST_PARTIAL_BYTES // (num_heads * num_splits * (2 + dim) * 4))
    merged = []
    for start in range(0, max(num_rows, 1), rows):
        numbers = _partials(
            query[start : start + rows], kv, layer, _rows_of(indices, start, start + rows), num_splits, scale,
            sliding_window, chunk, softcap, split,
        )  # fmt: skip
        merged.append(merge(numbers, sinks, query.dtype))
    return merged[0] if len(merged) == 1 else torch.cat(merged)


def merge(numbers: torch.Tensor, sinks: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    num_rows, num_heads, num_splits, width = numbers.shape
    out = torch.empty((num_rows, num_heads, width - 2), dtype=dtype, device=numbers.device)
    if num_rows:
        _merge_kernel[(num_rows, num_heads)](
            numbers.contiguous(), out, sinks, num_splits, num_heads,
            DIM=width - 2, PADDED_DIM=triton.next_power_of_2(width - 2), HAS_SINKS=sinks is not None,
        )  # fmt: skip
    return out


def _rows_of(indices: AttentionIndices, start: int, stop: int) -> AttentionIndices:
    return AttentionIndices(
        indices.slots[start:stop], indices.table_rows[start:stop], indices.context_lens[start:stop],
        indices.extra[start:stop], indices.slot_table,
    )  # fmt: skip


def _write_kv(key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, layer: int, slots: torch.Tensor) -> None:
    num_rows, num_kv_heads, dim = key.shape
    if num_rows == 0:
        return
    key, value = (x if x.stride(2) == 1 else x.contiguous() for x in (key, value))
    block_size, plane, block_stride, first = _strides(kv, layer)
    _write_kv_kernel[(num_rows, num_kv_heads)](
        key, value, kv, slots,
        *key.stride()[:2], *value.stride()[:2], block_stride, plane, first, num_kv_heads,
        DIM=dim, PADDED_DIM=triton.next_power_of_2(dim), BLOCK_SIZE=block_size,
    )  # fmt: skip


def _partials(
    query: torch.Tensor, kv: torch.Tensor, layer: int, indices: AttentionIndices, num_splits: int,
    scale: float, sliding_window: int | None, chunk: int | None, softcap: float, split: int,
) -> torch.Tensor:  # fmt: skip
    num_rows, num_heads, dim = query.shape
    shape = (num_rows, num_heads, num_splits, 2 + dim)
    numbers = torch.empty(shape, dtype=torch.float32, device=query.device)
    _attend(query, kv, layer, indices, None, numbers, scale, sliding_window, chunk, softcap, None, split)
    return numbers


def _attend(
    query: torch.Tensor, kv: torch.Tensor, layer: int, indices: AttentionIndices, out: torch.Tensor | None,
    numbers: torch.Tensor | None, scale: float, sliding_window: int | None, chunk: int | None,
    softcap: float, sinks: torch.Tensor | None, split: int,
) -> None:  # fmt: skip
    num_rows, num_heads, dim = query.shape
    num_kv_heads = kv.shape[4]
    if num_rows == 0:
        return
    extra, slot_table = indices.extra.contiguous(), indices.slot_table
    if slot_table.stride(1) != 1:
        slot_table = slot_table.contiguous()
    query = query if query.stride(2) == 1 else query.contiguous()
    block_size, plane, block_stride, first = _strides(kv, layer)
    group = num_heads // num_kv_heads
    num_splits = 1 if numbers is None else numbers.shape[2]
    _attention_kernel[(num_rows, num_kv_heads, num_splits)](
        query, kv, out, numbers, sinks, indices.table_rows, indices.context_lens, extra, slot_table, num_rows,
        *query.stride()[:2], slot_table.stride(0), extra.shape[1], block_stride, plane, first, num_heads, num_kv_heads,
        scale, softcap, sliding_window or 0, chunk or 0, split, num_splits,
        PADDED_EXTRA=triton.next_power_of_2(max(extra.shape[1], 1)), BLOCK_SIZE=block_size,
        HAS_SOFTCAP=softcap > 0.0, HAS_SINKS=sinks is not None, PARTIAL=numbers is not None,
        **tiles(group, dim), num_warps=WARPS,
    )  # fmt: skip


def tiles(group: int, dim: int) -> dict[str, int]:
    """Return tile sizes for `group` query heads per KV head, as large as registers hold without spilling."""
    padded_group, padded_dim = triton.next_power_of_2(group), max(16, triton.next_power_of_2(dim))
    rows, tile = (64, 64) if padded_dim <= 128 else (32, 32)
    return {
        "GROUP": group, "PADDED_GROUP": padded_group, "ROWS": max(1, rows // padded_group),
        "DIM": dim, "PADDED_DIM": padded_dim, "TILE": tile,
    }  # fmt: skip


def _strides(kv: torch.Tensor, layer: int) -> tuple[int, int, int, int]:
    _, num_layers, _, block_size, num_kv_heads, dim = kv.shape
    plane = block_size * num_kv_heads * dim
    return block_size, plane, num_layers * 2 * plane, layer * 2 * plane


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
    query, kv, out, numbers, sinks, table_rows, context_lens, extra, slot_table, num_rows,
    query_row, query_head, table_stride, extra_width, block_stride, plane, first, num_heads, num_kv_heads,
    scale, softcap, window, chunk, split, num_splits,
    GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PADDED_EXTRA: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    leader, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence = tl.load(table_rows + leader)
    if tl.load(table_rows + leader - 1, mask=leader % ROWS > 0, other=-1) == sequence:
        return  # the program of an earlier row serves this one too

    m, d, t = tl.arange(0, ROWS * PADDED_GROUP), tl.arange(0, PADDED_DIM), tl.arange(0, TILE)
    stop = tl.minimum(leader // ROWS * ROWS + ROWS, num_rows)
    row, heads = leader + m // PADDED_GROUP, kv_head * GROUP + m % PADDED_GROUP
    there = (row < stop) & (m % PADDED_GROUP < GROUP)
    there = there & (tl.load(table_rows + row, mask=there, other=-1) == sequence)
    row = row.to(tl.int64)
    inside = there[:, None] & (d < DIM)[None, :]
    q = tl.load(query + row[:, None] * query_row + heads[:, None] * query_head + d[None, :], mask=inside, other=0.0)

    context, e = tl.load(context_lens + row, mask=there, other=0), tl.arange(0, PADDED_EXTRA)  # [M], [E]
    extras = tl.load(
        extra + row[:, None] * extra_width + e[None, :], mask=there[:, None] & (e < extra_width)[None, :], other=-1
    )
    num_extras = tl.sum((extras >= 0).to(tl.int32), axis=1)
    begin, end = _visible(context + num_extras, window, chunk, part * split, split)
    shared_end = tl.where(num_extras > 0, tl.minimum(end, context // TILE * TILE), end)
    seen_by_any = there & (begin < shared_end)
    highest = tl.max(tl.where(seen_by_any, shared_end, 0), axis=0)
    lowest = tl.min(tl.where(seen_by_any, begin, highest), axis=0)

    table = slot_table + sequence.to(tl.int64) * table_stride
    kv += first + kv_head * DIM
    largest = tl.full([ROWS * PADDED_GROUP], float("-inf"), tl.float32)
    weight_sum = tl.zeros([ROWS * PADDED_GROUP], tl.float32)
    sums = tl.zeros([ROWS * PADDED_GROUP, PADDED_DIM], tl.float32)
    for start in range(lowest // TILE * TILE, highest, TILE):
        p = start + t  # [T] positions
        wanted = (p >= lowest) & (p < highest)
        slot = tl.load(table + p, mask=wanted, other=0)
        seen = (p[None, :] >= begin[:, None]) & (p[None, :] < shared_end[:, None])
        largest, weight_sum, sums = _add_tile(
            q, kv, slot, wanted, seen, largest, weight_sum, sums, scale, softcap, block_stride, plane, num_kv_heads,
            DIM, PADDED_DIM, BLOCK_SIZE, HAS_SOFTCAP,
        )  # fmt: skip
    for place in range(ROWS):  # each tree node alone, from the tile where its tree begins
        own = tl.minimum(leader + place, num_rows - 1)
        is_served = (leader + place < stop) & (tl.load(table_rows + own) == sequence)
        largest, weight_sum, sums = _add_node(
            q, kv, table, tl.load(context_lens + own), extra + own.to(tl.int64) * extra_width, is_served, place,
            largest, weight_sum, sums, extra_width, scale, softcap, window, chunk, part * split, split,
            block_stride, plane, num_kv_heads,
            PADDED_GROUP, ROWS, DIM, PADDED_DIM, BLOCK_SIZE, PADDED_EXTRA, TILE, HAS_SOFTCAP,
        )  # fmt: skip
    _store(
        out, numbers, sinks, row, heads, there, end, largest, weight_sum, sums, num_heads, num_splits, part,
        DIM, PADDED_DIM, HAS_SINKS, PARTIAL,
    )  # fmt: skip


@triton.jit  # type: ignore[untyped-decorator]
def _add_node(  # type: ignore[no-untyped-def]
    q, kv, table, context, extra, is_served, place, largest, weight_sum, sums, extra_width, scale, softcap, window,
    chunk, first, split, block_stride, plane, num_kv_heads,
    PADDED_GROUP: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PADDED_EXTRA: tl.constexpr, TILE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    # Add the keys that the row at `place` of the program's rows sees, from the tile on where its tree begins.
    m, t, e = tl.arange(0, ROWS * PADDED_GROUP), tl.arange(0, TILE), tl.arange(0, PADDED_EXTRA)
    extras = tl.load(extra + e, mask=(e < extra_width) & is_served, other=-1)
    count = tl.sum((extras >= 0).to(tl.int32), axis=0)
    begin, end = _visible(context + count, window, chunk, first, split)
    end = tl.where(count > 0, end, 0)
    begin = tl.maximum(begin, context // TILE * TILE)
    for start in tl.range(begin // TILE * TILE, end, TILE, num_stages=1):
        p = start + t
        wanted = (p >= begin) & (p < end)
        in_table = tl.load(table + p, mask=wanted & (p < context), other=0)
        in_extra = tl.load(extra + p - context, mask=wanted & (p >= context), other=0)
        slot = tl.where(p < context, in_table, in_extra)
        seen = wanted[None, :] & (m // PADDED_GROUP == place)[:, None]
        largest, weight_sum, sums = _add_tile(
            q, kv, slot, wanted, seen, largest, weight_sum, sums, scale, softcap, block_stride, plane, num_kv_heads,
            DIM, PADDED_DIM, BLOCK_SIZE, HAS_SOFTCAP,
        )  # fmt: skip
    return largest, weight_sum, sums


@triton.jit  # type: ignore[untyped-decorator]
def _store(  # type: ignore[no-untyped-def]
    out, numbers, sinks, row, heads, there, end, largest, weight_sum, sums, num_heads, num_splits, part,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HAS_SINKS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, PADDED_DIM)
    inside = there[:, None] & (d < DIM)[None, :]
    if PARTIAL:
        place = numbers + ((row * num_heads + heads) * num_splits + part) * (2 + DIM)
        tl.store(place, largest, mask=there)
        tl.store(place + 1, weight_sum, mask=there)
        tl.store(place[:, None] + 2 + d[None, :], sums, mask=inside)
    else:
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=there, other=0.0).to(tl.float32)
            shrink, weight_sum = _with_sink(largest, weight_sum, sink)
            sums = sums * shrink[:, None]
        weight_sum = tl.where(end > 0, weight_sum, 1.0)  # a padding row sees no key and gets zeros
        result = sums / weight_sum[:, None]
        place = out + (row[:, None] * num_heads + heads[:, None]) * DIM + d[None, :]
        tl.store(place, result.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_tile(  # type: ignore[no-untyped-def]
    q, kv, slot, wanted, seen, largest, weight_sum, sums, scale, softcap, block_stride, plane, num_kv_heads,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    # Add one tile of keys, in `slot` [T] where `wanted`, to the softmax of rows [M] that see them where `seen` [M, T].
    d = tl.arange(0, PADDED_DIM)
    token = slot.to(tl.int64) // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * num_kv_heads * DIM
    token = tl.multiple_of(token, DIM & -DIM)  # so that loads are vectorized
    place = kv + token[:, None] + d[None, :]  # [T, D]
    there = wanted[:, None] & (d < DIM)[None, :]  # slots that no row sees may hold anything, even NaN: never loaded
    k, v = tl.load(place, mask=there, other=0.0), tl.load(place + plane, mask=there, other=0.0)
    if q.dtype != k.dtype:
        q, k, v = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale  # [M, T] float32
    if HAS_SOFTCAP:
        scores = _tanh(scores / softcap) * softcap
    scores = tl.where(seen, scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, axis=1))
    shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # no key seen so far
    shrink = tl.exp(largest - shift)
    weights = tl.exp(scores - shift[:, None])
    # A weight of zero times NaN would be NaN: such values are skipped, and the rows that do see them become NaN.
    strange = (v != v) | (tl.abs(v.to(tl.float32)) == float("inf"))
    added = tl.dot(weights.to(v.dtype), tl.where(strange, 0.0, v).to(v.dtype), input_precision="ieee")
    strange_keys = tl.max(strange.to(tl.int32), axis=1)  # [T]
    weight = tl.where(
        tl.max(tl.where(seen, strange_keys[None, :], 0), axis=1) > 0, float("nan"), tl.sum(weights, axis=1)
    )
    is_seen = tl.max(seen.to(tl.int32), axis=1) > 0
    sums = tl.where(is_seen[:, None], sums * shrink[:, None] + added, sums)
    return new_largest, weight_sum * shrink + weight, sums


@triton.jit
def _visible(total, window, chunk, first, split):  # type: ignore[no-untyped-def]
    # Return the positions [begin, end) that rows of `total` positions see of the split beginning at `first`.
    begin = tl.where(window > 0, tl.maximum(total - window, 0), 0)
    begin = tl.where(chunk > 0, (total - 1) // tl.maximum(chunk, 1) * chunk, begin)
    return tl.maximum(begin, first), tl.minimum(total, first + split)


@triton.jit
def _with_sink(largest, weight_sum, sink):  # type: ignore[no-untyped-def]
    new_largest = tl.maximum(largest, sink)
    shrink = tl.exp(largest - new_largest)
    return shrink, weight_sum * shrink + tl.exp(sink - new_largest)


@triton.jit  # type: ignore[untyped-decorator]
def _merge_kernel(  # type: ignore[no-untyped-def]
    numbers, out, sinks, num_splits, num_heads,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, PADDED_DIM)
    first = numbers + (row * num_heads + head) * num_splits * (2 + DIM)
    largest, weight_sum = tl.load(first), tl.load(first + 1)
    sums = tl.load(first + 2 + d, mask=d < DIM, other=0.0)
    for part in range(1, num_splits):
        place = first + part * (2 + DIM)
        part_largest, part_sum = tl.load(place), tl.load(place + 1)
        new_largest = tl.maximum(largest, part_largest)
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)  # no key seen so far
        before, after = tl.exp(largest - shift), tl.exp(part_largest - shift)
        part_sums = tl.load(place + 2 + d, mask=d < DIM, other=0.0)
        weight_sum = weight_sum * before + part_sum * after
        sums = sums * before + part_sums * after
        largest = new_largest
    has_any = weight_sum != 0.0
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        shrink, weight_sum = _with_sink(largest, weight_sum, sink)
        sums = sums * shrink
    result = sums / tl.where(has_any, weight_sum, 1.0)
    tl.store(out + (row * num_heads + head) * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    z = x * x  # near zero an odd polynomial, where 1 - 2 / (e^2x + 1) would lose its digits
    p = -5.70498872745e-3
    p = p * z + 2.06390887954e-2
    p = p * z - 5.37397155531e-2
    p = p * z + 1.33314422036e-1
    p = p * z - 3.33332819422e-1
    return tl.where(tl.abs(x) < 0.625, x + x * z * p, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))
