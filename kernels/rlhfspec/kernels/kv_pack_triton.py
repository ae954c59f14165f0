"""Packing KV on a GPU: the Triton kernels behind `kv_pack` (contract and twins are there).

Both shapes of journey are copies of runs that are contiguous on either side: of a slot, one run per layer and plane
(key, value); of a block, the block. A program copies one piece of one run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PIECE = 1024  # elements that one program copies


def pack_slots(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    _, num_layers, _, _, num_kv_heads, dim = kv.shape
    packed = torch.empty((len(slots), num_layers, 2, num_kv_heads, dim), dtype=kv.dtype, device=kv.device)
    _copy_slots(packed, kv, slots, pack=True)
    return packed


def unpack_slots(packed: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    _copy_slots(packed, kv, slots, pack=False)


def pack_blocks(kv: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    packed = torch.empty((len(block_ids), *kv.shape[1:]), dtype=kv.dtype, device=kv.device)
    _copy_blocks(packed, kv, block_ids, pack=True)
    return packed


def unpack_blocks(packed: torch.Tensor, kv: torch.Tensor, block_ids: torch.Tensor) -> None:
    _copy_blocks(packed, kv, block_ids, pack=False)


def _copy_slots(packed: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, *, pack: bool) -> None:
    _, num_layers, _, block_size, num_kv_heads, dim = kv.shape
    run = num_kv_heads * dim
    _copy(packed, kv, slots, planes=num_layers * 2, run=run, rows_per_block=block_size, pack=pack)


def _copy_blocks(packed: torch.Tensor, kv: torch.Tensor, block_ids: torch.Tensor, *, pack: bool) -> None:
    _copy(packed, kv, block_ids, planes=1, run=kv[0].numel(), rows_per_block=1, pack=pack)


def _copy(
    packed: torch.Tensor, kv: torch.Tensor, rows: torch.Tensor,
    *, planes: int, run: int, rows_per_block: int, pack: bool,
) -> None:  # fmt: skip
    """kv seen as [blocks, planes, rows_per_block, run], packed as [n, planes, run]."""
    if len(rows) == 0:
        return
    piece = min(PIECE, triton.next_power_of_2(run))
    grid = (len(rows), planes, triton.cdiv(run, piece))
    _copy_kernel[grid](packed, kv, rows, planes, run, ROWS_PER_BLOCK=rows_per_block, PIECE=piece, PACK=pack)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_kernel(  # type: ignore[no-untyped-def]
    packed, kv, rows, planes, run, ROWS_PER_BLOCK: tl.constexpr, PIECE: tl.constexpr, PACK: tl.constexpr
):
    index, plane = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.program_id(2) * PIECE + tl.arange(0, PIECE)
    there = columns < run
    row = tl.load(rows + index).to(tl.int64)
    inner = (row // ROWS_PER_BLOCK * planes + plane) * ROWS_PER_BLOCK + row % ROWS_PER_BLOCK
    outside = packed + (index * planes + plane) * run + columns
    inside = kv + inner * run + columns
    if PACK:
        tl.store(outside, tl.load(inside, mask=there), mask=there)
    else:
        tl.store(inside, tl.load(outside, mask=there), mask=there)
