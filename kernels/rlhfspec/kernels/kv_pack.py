"""Packing of scattered KV slots into one contiguous tensor for transfer, and back, bit for bit."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rlhfspec.kernels.cpu import build

IntArray = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]


def pack_slots(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gather kv [blocks, layers, 2, block size, Hkv, D] at slots [n] (int32). Return [n, layers, 2, Hkv, D]."""
    _check(kv, slots)
    return _gathered(kv, slots)


def unpack_slots(packed: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Scatter packed [n, layers, 2, Hkv, D] to slots [n] of kv; other slots stay unchanged."""
    _check(kv, slots, unique=True)
    _, num_layers, _, _, num_kv_heads, dim = kv.shape
    _check_packed(packed, kv, (len(slots), num_layers, 2, num_kv_heads, dim))
    _scatter(packed, kv, slots)


def copy_slots(kv: torch.Tensor, source: IntArray, target: IntArray) -> None:
    """Copy slots `source` [n] to slots `target` [n], without waiting for the device."""
    _check_slots(kv, source)
    _check_slots(kv, target, unique=True)
    from_slots, to_slots = (torch.from_numpy(slots).to(kv.device) for slots in (source, target))
    _scatter(_gathered(kv, from_slots), kv, to_slots)


def _gathered(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    if kv.is_cuda:
        from rlhfspec.kernels import kv_pack_triton  # lazily: a CPU machine may lack triton

        return kv_pack_triton.pack_slots(kv, slots)
    if (kernel := _kernel_of(kv)) is None:
        return pack_slots_reference(kv, slots)
    packed = torch.empty((len(slots), *kv.shape[1:3], *kv.shape[4:]), dtype=kv.dtype)
    _copy(kernel, packed, kv, slots, is_pack=True)
    return packed


def _scatter(packed: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    if kv.is_cuda:
        from rlhfspec.kernels import kv_pack_triton

        kv_pack_triton.unpack_slots(packed.contiguous(), kv, slots)
    elif (kernel := _kernel_of(kv)) is None:
        unpack_slots_reference(packed, kv, slots)
    else:
        _copy(kernel, packed.contiguous(), kv, slots, is_pack=False)


def pack_into(kv: torch.Tensor, slots: IntArray, out: Bytes) -> None:
    """Pack slots into host memory `out` [n, bytes per slot], such as a socket buffer, waiting for the device."""
    _check_memory(kv, slots, out)
    if (kernel := _kernel_of(kv)) is not None:
        _copy_bytes(kernel, out, kv, slots, is_pack=True)
    elif len(slots):
        packed = _gathered(kv, torch.from_numpy(slots).to(kv.device))
        out[...] = _bytes_of(_staging(kv, len(slots)).copy_(packed)).reshape(out.shape)


def unpack_from(packed: Bytes, kv: torch.Tensor, slots: IntArray) -> None:
    """Unpack slots from host memory [n, bytes per slot], maybe read-only, without waiting for the device."""
    _check_memory(kv, slots, packed, unique=True)
    if (kernel := _kernel_of(kv)) is not None:
        _copy_bytes(kernel, packed, kv, slots, is_pack=False)
    elif len(slots):
        staged = _staging(kv, len(slots))
        _bytes_of(staged)[...] = packed.reshape(-1)
        _scatter(staged.to(kv.device, non_blocking=True), kv, torch.from_numpy(slots).to(kv.device))


def _staging(kv: torch.Tensor, num_slots: int) -> torch.Tensor:
    shape = (num_slots, *kv.shape[1:3], *kv.shape[4:])
    return torch.empty(shape, dtype=kv.dtype, pin_memory=kv.is_cuda)


def _bytes_of(tensor: torch.Tensor) -> Bytes:
    found: Bytes = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


def _copy_bytes(kernel: Any, packed: Bytes, kv: torch.Tensor, slots: IntArray, *, is_pack: bool) -> None:
    _, num_layers, _, block_size, num_kv_heads, dim = kv.shape
    run = num_kv_heads * dim * kv.element_size()
    kernel(
        kv.data_ptr(), packed.ctypes.data, slots.ctypes.data,
        len(slots), num_layers * 2, block_size, run, is_pack, build.num_threads(),
    )  # fmt: skip


def _kernel_of(kv: torch.Tensor) -> Any:
    return _kernel() if kv.is_cpu else None


@functools.cache
def _kernel() -> Any:
    kernel = build.function("kv_copy")
    if kernel is not None:
        kernel.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_long] * 4 + [ctypes.c_int] * 2
    return kernel


def _copy(kernel: Any, packed: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor, *, is_pack: bool) -> None:
    _, num_layers, _, block_size, num_kv_heads, dim = kv.shape
    slots, run = slots.contiguous(), num_kv_heads * dim * kv.element_size()
    kernel(
        kv.data_ptr(), packed.data_ptr(), slots.data_ptr(),
        len(slots), num_layers * 2, block_size, run, is_pack, build.num_threads(),
    )  # fmt: skip


def pack_slots_reference(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    block, offset = _places(kv, slots)
    return kv[block, :, :, offset].contiguous()


def unpack_slots_reference(packed: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    block, offset = _places(kv, slots)
    kv[block, :, :, offset] = packed


def _places(kv: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    block_size = kv.shape[3]
    return slots.long() // block_size, slots.long() % block_size


def _check(kv: torch.Tensor, slots: torch.Tensor, *, unique: bool = False) -> None:
    if kv.dim() != 6 or kv.shape[2] != 2 or not kv.is_contiguous():
        raise ValueError("kv: must be contiguous [blocks, layers, 2, block size, kv heads, head dim]")
    if slots.dim() != 1 or slots.dtype != torch.int32 or slots.device != kv.device:
        raise ValueError(f"slots: must be int32 [n] on {kv.device} (got {slots.dtype} on {slots.device})")
    if len(slots) == 0:
        return
    limit = kv.shape[0] * kv.shape[3]
    lowest, highest = (int(value) for value in torch.stack(slots.aminmax()).tolist())
    if lowest < 0 or highest >= limit:
        raise ValueError(f"slots: must be in [0, {limit}) (got {lowest} to {highest})")
    if unique:  # two writers of one slot would leave either one's bits
        ordered = slots.sort().values
        if bool((ordered[1:] == ordered[:-1]).any()):
            raise ValueError("slots: must not repeat")


def _check_memory(kv: torch.Tensor, slots: IntArray, packed: Bytes, *, unique: bool = False) -> None:
    _check_slots(kv, slots, unique=unique)
    num_bytes = kv.nbytes // (kv.shape[0] * kv.shape[3])
    if packed.dtype != np.uint8 or packed.shape != (len(slots), num_bytes) or not packed.flags.c_contiguous:
        raise ValueError(f"packed: must be uint8 {(len(slots), num_bytes)} (got {packed.dtype} {packed.shape})")


def _check_slots(kv: torch.Tensor, slots: IntArray, *, unique: bool = False) -> None:
    if slots.dtype != np.int32 or slots.ndim != 1 or not slots.flags.c_contiguous:
        raise ValueError(f"slots: must be int32 [n], contiguous (got {slots.dtype} {slots.shape})")
    if not kv.is_contiguous():
        raise ValueError("kv: must be contiguous [blocks, layers, 2, block size, kv heads, head dim]")
    limit = kv.shape[0] * kv.shape[3]
    if len(slots) and not 0 <= slots.min() <= slots.max() < limit:
        raise ValueError(f"slots: must be in [0, {limit}) (got {slots.min()} to {slots.max()})")
    if unique and len(slots) > 1 and not np.diff(np.sort(slots)).all():
        raise ValueError("slots: must not repeat")


def _check_packed(packed: torch.Tensor, kv: torch.Tensor, shape: tuple[int, ...]) -> None:
    if packed.shape != shape or packed.dtype != kv.dtype or packed.device != kv.device:
        raise ValueError(
            f"packed: must be {shape} {kv.dtype} on {kv.device} "
            f"(got {tuple(packed.shape)} {packed.dtype} on {packed.device})"
        )
