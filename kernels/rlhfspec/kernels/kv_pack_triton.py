"""Triton kernels behind `kv_pack`. Each program copies part of a slot's keys or values in one layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PIECE = 1024  # elements that one program copies


def pack_slots(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    packed = torch.empty((len(slots), *kv.shape[1:3], *kv.shape[4:]), dtype=kv.dtype, device=kv.device)
    _copy(packed, kv, slots, pack=True)
    return packed


def unpack_slots(packed: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    _copy(packed, kv, slots, pack=False)


def _copy(packed: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, *, pack: bool) -> None:
    """Copy between kv, as [blocks, 2 * layers, block size, heads * dim], and packed [n, 2 * layers, heads * dim]."""
    if len(slots) == 0:
        return
    _, num_layers, _, block_size, num_kv_heads, dim = kv.shape
    planes, run = num_layers * 2, num_kv_heads * dim
    piece = min(PIECE, triton.next_power_of_2(run))
    grid = (len(slots), planes, triton.cdiv(run, piece))
    _copy_kernel[grid](packed, kv, slots, planes, run, ROWS_PER_BLOCK=block_size, PIECE=piece, PACK=pack)


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
