"""Paged tree attention over a token-addressed KV cache: one call for the new tokens of all sequences.

A cache block is contiguous and holds all layers. Slot s is a token's place in every layer: block s // block_size,
offset s % block_size. The bits of an output row depend only on its query and the keys and values it sees, not on
other rows or on slots; `csrc/attention_math.h` fixes the order of sums.

In the example, the second of two prompts carries a tree node.

>>> meta = AttentionMeta(
...     slots=torch.tensor([0, 16, 17], dtype=torch.int32),         # where each row's key and value go
...     table_rows=torch.tensor([0, 1, 1], dtype=torch.int32),
...     context_lens=torch.tensor([1, 1, 1], dtype=torch.int32),    # what the row sees of its slot table
...     extra=torch.tensor([[-1], [-1], [17]], dtype=torch.int32),  # ... and beyond it: ancestors, then itself
...     slot_table=torch.tensor([[0], [16]], dtype=torch.int32),
... )
>>> kv = torch.zeros(2, 1, 2, 16, 1, 4)  # [blocks, layers, key/value, block size, kv heads, head dim]
>>> key = torch.zeros(3, 1, 4)
>>> value = torch.arange(3.0)[:, None, None].expand(3, 1, 4)
>>> tree_attention(torch.ones(3, 2, 4), key, value, kv, 0, meta, scale=0.5)[:, 0, 0].tolist()
[0.0, 1.0, 1.5]
"""

from __future__ import annotations

import ctypes
import functools
import struct
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlhfspec.kernels.attention_splits import SPLIT, check_split
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.tree_attention_twin import AttentionIndices, tree_attention_reference

IndexArray = npt.NDArray[np.int32] | torch.Tensor


@dataclass(slots=True)
class AttentionMeta:
    """Keys that each query row sees, built once per forward pass.

    Row i attends, in ascending position, slot_table[table_rows[i], :context_lens[i]] and then extra[i] up to its first
    -1. The last of these is the row itself. A row with slot -1 stores nothing; a row without keys gives zeros. On the
    CPU, neighbouring rows of a sequence share loaded keys. Arrays are int32, all numpy or all on the query's device.
    """

    slots: IndexArray  # [N]
    table_rows: IndexArray  # [N]
    context_lens: IndexArray  # [N]
    extra: IndexArray  # [N, E], padded with -1 at the end; E may be 0
    slot_table: IndexArray  # [R, L]
    _native: NativeBatch | None = field(default=None, init=False, repr=False, compare=False)
    _tensors: dict[torch.device, AttentionIndices] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        num_rows = len(self.slots)
        expected = (("slots", 1), ("table_rows", 1), ("context_lens", 1), ("extra", 2), ("slot_table", 2))
        for name, num_dims in expected:
            array = getattr(self, name)
            if array.dtype not in (np.int32, torch.int32):
                raise ValueError(f"{name}: must be int32 (got {array.dtype})")
            if array.ndim != num_dims or (name != "slot_table" and array.shape[0] != num_rows):
                raise ValueError(f"{name}: must have {num_dims} dimensions, {num_rows} rows (got {tuple(array.shape)})")

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    def native(self) -> NativeBatch:
        """Return the view that the C++ kernel reads; the first call checks every index."""
        if self._native is None:
            self._native = NativeBatch.of(self)
        return self._native

    def tensors(self, device: torch.device) -> AttentionIndices:
        if device not in self._tensors:
            arrays = (self.slots, self.table_rows, self.context_lens, self.extra, self.slot_table)
            self._tensors[device] = AttentionIndices(*(torch.as_tensor(array, device=device) for array in arrays))
        return self._tensors[device]


def tree_attention(
    query: torch.Tensor,  # [N, H, D]
    key: torch.Tensor,  # [N, Hkv, D]
    value: torch.Tensor,  # [N, Hkv, D]
    kv: torch.Tensor,  # [blocks, layers, 2, block size, Hkv, D]
    layer: int,
    meta: AttentionMeta,
    *,
    scale: float,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,  # [H]
    split: int = SPLIT,
) -> torch.Tensor:
    """Write all rows' keys and values into `kv`, then attend; return [N, H, D] in the query's dtype.

    sliding_window w: see keys at positions above query position - w. chunk c: see keys in the query's own chunk of c
    positions. softcap c: scores become c * tanh(score / c). sinks: one more logit per head in the softmax's
    denominator. split: positions per softmax, which affects bits.
    """
    _check_call(query, key, value, kv, layer, meta, scale, sliding_window, chunk, softcap, sinks, split)
    if query.is_cuda:
        from rlhfspec.kernels import tree_attention_triton  # lazily: a CPU machine may lack triton

        return tree_attention_triton.tree_attention(
            query, key, value, kv, layer, meta.tensors(query.device),
            scale=scale, sliding_window=sliding_window, chunk=chunk, softcap=softcap, sinks=sinks, split=split,
        )  # fmt: skip
    if _has_native(query, kv):
        return _native(query, key, value, kv, layer, meta, scale, sliding_window, chunk, softcap, sinks, split)
    return tree_attention_reference(
        query, key, value, kv, layer, meta,
        scale=scale, sliding_window=sliding_window, chunk=chunk, softcap=softcap, sinks=sinks, split=split,
    )  # fmt: skip


def _check_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, layer: int, meta: AttentionMeta,
    scale: float, sliding_window: int | None, chunk: int | None, softcap: float, sinks: torch.Tensor | None, split: int,
) -> None:  # fmt: skip
    num_rows, num_heads, dim = query.shape
    _, num_layers, planes, block_size, num_kv_heads, kv_dim = kv.shape
    if num_rows != meta.num_rows:
        raise ValueError(f"query: must have the {meta.num_rows} rows of meta (got {num_rows})")
    if num_heads % num_kv_heads or dim != kv_dim:
        raise ValueError(f"query: [{num_heads}, {dim}] does not fit the cache's [{num_kv_heads}, {kv_dim}] per token")
    wanted = (num_rows, num_kv_heads, dim)
    if key.shape != wanted or value.shape != wanted:
        raise ValueError(f"key, value: must be {wanted} (got {tuple(key.shape)}, {tuple(value.shape)})")
    if planes != 2 or block_size & (block_size - 1) or not kv.is_contiguous():
        raise ValueError("kv: must be contiguous [blocks, layers, 2, block size (a power of two), kv heads, head dim]")
    if not 0 <= layer < num_layers:
        raise ValueError(f"layer: must be in [0, {num_layers}) (got {layer})")
    for name, given in (("sliding_window", sliding_window), ("chunk", chunk)):
        if given is not None and given < 1:
            raise ValueError(f"{name}: must be >= 1 or None (got {given})")
    if sliding_window is not None and chunk is not None:
        raise ValueError("sliding_window, chunk: at most one may be given")
    if not scale > 0.0:
        raise ValueError(f"scale: must be > 0 (got {scale})")
    if not softcap >= 0.0:
        raise ValueError(f"softcap: must be >= 0 (got {softcap})")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks: must be [{num_heads}] (got {tuple(sinks.shape)})")
    check_split(split)


PROBLEMS = (
    "",
    "table_rows: outside the slot table",
    "context_lens: below 0 or wider than the slot table",
    "slots: below -1",
    "extra: -1 is allowed only after the slots",
    "slot_table: a negative slot within the context",
)


CALL = struct.Struct("@24q2f")  # mirrors struct AttentionCall of csrc/attention.h; packing is cheaper than 22 arguments


class _BatchStruct(ctypes.Structure):
    """Mirror of struct Batch in csrc/attention.cpp."""

    _pointers = ("slots", "table_rows", "context_lens", "extra", "slot_table", "extra_lens", "groups")
    _numbers = (
        "num_rows", "extra_width", "table_height", "table_width", "table_stride",
        "num_groups", "longest", "num_keys", "highest_slot", "problem", "problem_row",
    )  # fmt: skip
    _fields_ = [(name, ctypes.c_void_p) for name in _pointers] + [(name, ctypes.c_int64) for name in _numbers]


@dataclass(frozen=True, slots=True)
class NativeBatch:
    fields: _BatchStruct
    address: int
    highest_slot: int
    arrays: tuple[npt.NDArray[np.int32], ...]

    @classmethod
    def of(cls, meta: AttentionMeta) -> NativeBatch:
        """Build the native view of `meta`. Raise ValueError, naming array and row, for an invalid index."""
        lists = [_numpy(array) for array in (meta.slots, meta.table_rows, meta.context_lens, meta.extra)]
        lists = [np.ascontiguousarray(array) for array in lists]
        table = _numpy(meta.slot_table)
        if table.strides[1] != 4:  # rows may be strided, entries may not
            table = np.ascontiguousarray(table)
        num_rows = meta.num_rows
        filled = [np.zeros(num_rows, np.int32), np.zeros(num_rows + 1, np.int32)]
        arrays = (*lists, table, *filled)
        fields = _BatchStruct(
            *(array.ctypes.data for array in arrays),
            num_rows, lists[3].shape[1], *table.shape, table.strides[0] // 4,
        )  # fmt: skip
        address = ctypes.addressof(fields)
        _kernels().plan(address)
        if fields.problem:
            raise ValueError(f"{PROBLEMS[fields.problem]} (row {fields.problem_row})")
        return cls(fields, address, fields.highest_slot, arrays)


def _numpy(array: IndexArray) -> npt.NDArray[np.int32]:
    return array.numpy() if isinstance(array, torch.Tensor) else array


@dataclass(frozen=True, slots=True)
class _Kernels:
    plan: Any
    attend: Any


@functools.cache
def _kernels(isa: str | None = None) -> _Kernels:
    plan, attend = build.function("tree_attention_plan", isa), build.function("tree_attention", isa)
    plan.argtypes = attend.argtypes = [ctypes.c_void_p]
    build.check_sizes("attention", ctypes.sizeof(_BatchStruct), CALL.size)
    return _Kernels(plan, attend)


def _has_native(query: torch.Tensor, kv: torch.Tensor) -> bool:
    takes = query.dtype == torch.float32 and kv.dtype in (torch.float32, torch.bfloat16)
    return query.is_cpu and takes and build.load() is not None


def _native(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, layer: int, meta: AttentionMeta,
    scale: float, sliding_window: int | None, chunk: int | None, softcap: float, sinks: torch.Tensor | None, split: int,
) -> torch.Tensor:  # fmt: skip
    batch = meta.native()
    num_rows, num_heads, dim = query.shape
    num_blocks, num_layers, _, block_size, num_kv_heads, _ = kv.shape
    if batch.highest_slot >= num_blocks * block_size:
        raise ValueError(f"meta: slot {batch.highest_slot} is outside the cache's {num_blocks * block_size}")
    query, key, value = _readable(query), _readable(key), _readable(value)
    sinks = None if sinks is None else sinks.float().contiguous()
    out = torch.empty((num_rows, num_heads, dim))
    plane = block_size * num_kv_heads * dim
    call = CALL.pack(
        batch.address,
        query.data_ptr(), *query.stride()[:2], key.data_ptr(), *key.stride()[:2], value.data_ptr(), *value.stride()[:2],
        kv.data_ptr() + layer * 2 * plane * kv.element_size(), kv.dtype == torch.bfloat16,
        num_layers * 2 * plane, plane, block_size, num_heads, num_kv_heads, dim,
        sliding_window or 0, chunk or 0, split, 0 if sinks is None else sinks.data_ptr(), out.data_ptr(),
        build.num_threads(), scale, softcap,
    )  # fmt: skip
    _kernels().attend(call)
    return out


def _readable(rows: torch.Tensor) -> torch.Tensor:
    if rows.dtype != torch.float32:
        rows = rows.float()
    return rows if rows.stride(2) == 1 else rows.contiguous()
