"""Triton kernels behind `few_bit_linear`.

A program multiplies OUTPUTS outputs with ROWS rows over a part of the inputs. Numbers become floats in registers.
If few programs would run, several share the inputs of the same outputs; the last to arrive adds their sums in order.
"""

# Triton has no types for its decorator or for kernel arguments.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 128
_LEAST_ROWS, _MOST_ROWS = 16, 64  # of a program
_LEAST_BLOCKS = 4  # of inputs, of a program
# Two words ($4) of four numbers each, and their scales ($5 of the lower two, $6), become four pairs of 16-bit floats. A
# number's bits, the highest flipped, become the last bits of a large float, from which the offset is then taken.
_UNPACK = """{{
.reg .b32 a, b, c, one, zero, offset;
mov.b32 one, {one:#x};
mov.b32 zero, 0x80008000;
mov.b32 offset, {offset:#x};
shr.u32 a, $4, 4;
shr.u32 b, $4, 8;
shr.u32 c, $4, 12;
lop3.b32 $0, $4, 0xf000f, {large:#x}, 0x6a;
lop3.b32 $1, a, 0xf000f, {large:#x}, 0x6a;
lop3.b32 $2, b, 0xf000f, {large:#x}, 0x6a;
lop3.b32 $3, c, 0xf000f, {large:#x}, 0x6a;
fma.rn.{kind} $0, $0, one, offset;
fma.rn.{kind} $1, $1, one, offset;
fma.rn.{kind} $2, $2, one, offset;
fma.rn.{kind} $3, $3, one, offset;
fma.rn.{kind} $0, $0, $5, zero;
fma.rn.{kind} $1, $1, $5, zero;
fma.rn.{kind} $2, $2, $6, zero;
fma.rn.{kind} $3, $3, $6, zero;
}}"""
UNPACK_BFLOAT16 = _UNPACK.format(kind="bf16x2", large=0x43084308, one=0x3F803F80, offset=0xC308C308)  # 128 + 8
UNPACK_FLOAT16 = _UNPACK.format(kind="f16x2", large=0x64086408, one=0x3C003C00, offset=0xE408E408)  # 1024 + 8
_BFLOAT16, _FLOAT16 = tl.constexpr(UNPACK_BFLOAT16), tl.constexpr(UNPACK_FLOAT16)
_OPERANDS = tl.constexpr("=&r,=&r,=&r,=&r,r,r,r")


def quantise(weight: Tensor, numbers: Tensor, scales: Tensor) -> None:
    num_blocks, num_outputs, num_words = numbers.shape
    grid = (num_blocks, triton.cdiv(num_outputs, OUTPUTS))
    _quantise_kernel[grid](weight, numbers, scales, num_outputs, *weight.stride(), WORDS=num_words, OUTPUTS=OUTPUTS)


def product(rows: Tensor, numbers: Tensor, scales: Tensor, bias: Tensor | None, arrived: Tensor) -> Tensor:
    given = rows.contiguous() if rows.dtype.itemsize == 2 else rows.to(torch.bfloat16)
    num_blocks, num_outputs, num_words = numbers.shape
    num_rows = len(rows)
    out = torch.empty((num_rows, num_outputs), dtype=rows.dtype, device=rows.device)
    if not num_rows:
        return out
    tile = rows_of_a_program(num_rows)
    grid = (triton.cdiv(num_rows, tile), triton.cdiv(num_outputs, OUTPUTS))
    num_parts = parts_of(grid[0] * grid[1], num_blocks, len(arrived))
    parts = torch.empty((num_parts, *out.shape), dtype=torch.float32, device=rows.device) if num_parts > 1 else None
    _product_kernel[(*grid, num_parts)](
        given, numbers, scales, bias, out, parts, arrived, num_rows, num_outputs, num_blocks, num_parts,
        WORDS=num_words, OUTPUTS=OUTPUTS, ROWS=tile, HAS_BIAS=bias is not None, IS_PART=parts is not None,
        HAS_ASSEMBLY=not triton.knobs.runtime.interpret, **launch(tile),
    )  # fmt: skip
    return out


def rows_of_a_program(num_rows: int) -> int:
    return min(max(int(triton.next_power_of_2(num_rows)), _LEAST_ROWS), _MOST_ROWS)


def launch(rows: int) -> dict[str, int]:
    """Return launch options that keep sums of a program in registers."""
    return {"num_warps": 8 if rows == _MOST_ROWS else 4, "num_stages": 4}


def parts_of(num_programs: int, num_blocks: int, most_programs: int) -> int:
    """Return how many programs share the inputs of the same outputs, without `most_programs` in all being exceeded.

    >>> [parts_of(num_programs, 64, 256) for num_programs in (8, 32, 112, 1002)]
    [16, 8, 2, 1]
    """
    return max(1, min(most_programs // num_programs, num_blocks // _LEAST_BLOCKS))


@triton.jit
def _quantise_kernel(
    weight, numbers, scales, num_outputs, output_stride, input_stride, WORDS: tl.constexpr, OUTPUTS: tl.constexpr
):
    block, output = tl.program_id(0).to(tl.int64), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output, i = output < num_outputs, tl.arange(0, WORDS)
    weight += output.to(tl.int64)[:, None] * output_stride + (block * 64 + i)[None, :] * input_stride
    there = is_output[:, None]
    if WORDS == 16:
        w0 = tl.load(weight, mask=there, other=0.0).to(tl.float32)
        w1 = tl.load(weight + 16 * input_stride, mask=there, other=0.0).to(tl.float32)
        w2 = tl.load(weight + 32 * input_stride, mask=there, other=0.0).to(tl.float32)
        w3 = tl.load(weight + 48 * input_stride, mask=there, other=0.0).to(tl.float32)
        first = _scale(tl.maximum(w0, w1), tl.minimum(w0, w1), 8)
        second = _scale(tl.maximum(w2, w3), tl.minimum(w2, w3), 8)
        word = (_number(w0, first, 8) & 15) | ((_number(w1, first, 8) & 15) << 4)
        word |= ((_number(w2, second, 8) & 15) << 8) | (_number(w3, second, 8) << 12)
    else:
        w0 = tl.load(weight, mask=there, other=0.0).to(tl.float32)
        w1 = tl.load(weight + 32 * input_stride, mask=there, other=0.0).to(tl.float32)
        first, second = _scale(w0, w0, 128), _scale(w1, w1, 128)
        word = (_number(w0, first, 128) & 255) | (_number(w1, second, 128) << 8)
    tl.store(numbers + (block * num_outputs + output)[:, None] * WORDS + i[None, :], word.to(tl.int16), mask=there)
    tl.store(scales + block * num_outputs + output, (first & 0xFFFF) | (second << 16), mask=is_output)


@triton.jit
def _scale(highest, lowest, LEVELS: tl.constexpr):
    """Return the bits of a group's scales [OUTPUTS], rounded to bfloat16, as int32."""
    highest, lowest = tl.max(highest, axis=1), tl.min(lowest, axis=1)
    bits = (tl.where(highest > -lowest, highest, lowest) / -LEVELS).to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _number(w, scale, LEVELS: tl.constexpr):
    divisor = (scale << 16).to(tl.float32, bitcast=True)[:, None]
    exact = tl.where(divisor == 0.0, 0.0, tl.div_rn(w, tl.where(divisor == 0.0, 1.0, divisor)))
    return tl.minimum(tl.maximum(tl.floor(exact + 0.5), -LEVELS), LEVELS - 1).to(tl.int32)


@triton.jit
def _product_kernel(
    rows, numbers, scales, bias, out, parts, arrived, num_rows, num_outputs, num_blocks, num_parts,
    WORDS: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_PART: tl.constexpr, HAS_ASSEMBLY: tl.constexpr,
):  # fmt: skip
    leader, tile, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, output, i = leader * ROWS + tl.arange(0, ROWS), tile * OUTPUTS + tl.arange(0, OUTPUTS), tl.arange(0, WORDS)
    is_row, is_output = row < num_rows, output < num_outputs
    share = tl.cdiv(num_blocks, num_parts)
    block = part.to(tl.int64) * share
    rows += row.to(tl.int64)[None, :] * (num_blocks * 64) + i[:, None] + block * 64  # [WORDS, ROWS]
    numbers += output[:, None] * WORDS + i[None, :] + block * num_outputs * WORDS  # [OUTPUTS, WORDS]
    scales += output + block * num_outputs
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for _ in range(part * share, tl.minimum(part * share + share, num_blocks)):
        word = tl.load(numbers, mask=is_output[:, None], other=0)
        scale = tl.load(scales, mask=is_output, other=0)[:, None]
        first, second = (scale << 16).to(tl.float32, bitcast=True), (scale & -65536).to(tl.float32, bitcast=True)
        if WORDS == 16:
            w0, w1, w2, w3 = _unpacked(word, first, second, rows.dtype.element_ty, HAS_ASSEMBLY)
            total = _added(total, w0, rows, is_row)
            total = _added(total, w1, rows + 16, is_row)
            total = _added(total, w2, rows + 32, is_row)
            total = _added(total, w3, rows + 48, is_row)
        else:
            total = _added(total, ((word << 8) >> 8).to(tl.float32) * first, rows, is_row)
            total = _added(total, (word >> 8).to(tl.float32) * second, rows + 32, is_row)
        rows += 64
        numbers += num_outputs * WORDS
        scales += num_outputs
    place = row.to(tl.int64)[None, :] * num_outputs + output[:, None]
    there = is_output[:, None] & is_row[None, :]
    if IS_PART:
        sums = parts + place
        tl.store(sums + part.to(tl.int64) * num_rows * num_outputs, total, mask=there)
        tl.debug_barrier()  # all of this program's sums are stored before it counts itself
        counter = arrived + leader * tl.num_programs(1) + tile
        if tl.atomic_add(counter, 1) == num_parts - 1:
            tl.store(counter, 0)  # for the next call
            total = tl.zeros([OUTPUTS, ROWS], tl.float32)
            for _ in range(num_parts):
                total += tl.load(sums, mask=there, other=0.0, cache_modifier=".cg")
                sums += num_rows * num_outputs
            _store(out + place, total, bias, output, is_output, there, HAS_BIAS)
    else:
        _store(out + place, total, bias, output, is_output, there, HAS_BIAS)


@triton.jit
def _unpacked(word, first, second, dtype: tl.constexpr, HAS_ASSEMBLY: tl.constexpr):
    """Return weights of the four numbers of each word."""
    if HAS_ASSEMBLY:
        first, second = first.to(dtype).broadcast_to(word.shape), second.to(dtype).broadcast_to(word.shape)
        if dtype == tl.bfloat16:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                _BFLOAT16, _OPERANDS, [word, first, second], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True, pack=2,
            )  # fmt: skip
        else:
            w0, w1, w2, w3 = tl.inline_asm_elementwise(
                _FLOAT16, _OPERANDS, [word, first, second], (tl.float16, tl.float16, tl.float16, tl.float16),
                is_pure=True, pack=2,
            )  # fmt: skip
    else:
        w0, w1 = ((word << 12) >> 12).to(tl.float32) * first, ((word << 8) >> 12).to(tl.float32) * first
        w2, w3 = ((word << 4) >> 12).to(tl.float32) * second, (word >> 12).to(tl.float32) * second
    return w0, w1, w2, w3


@triton.jit
def _added(total, weight, rows, is_row):
    x = tl.load(rows, mask=is_row[None, :], other=0.0)
    return tl.dot(weight.to(x.dtype), x, total)


@triton.jit
def _store(out, total, bias, output, is_output, there, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        total += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    tl.store(out, total.to(out.dtype.element_ty), mask=there)
