"""Packing KV for a journey: the scattered slots or blocks of a sequence as one contiguous tensor, and back.

Many small sends are 10-30 times slower than one large one. Slots pack exactly what a sequence owns; blocks (which are
contiguous over layers) pack faster where whole blocks travel. On CUDA one Triton kernel does each; elsewhere torch
indexing, which is also the twin that the kernels are tested against. Bits are copied, never converted.

Example:
    >>> kv = torch.arange(16.0).reshape(2, 1, 2, 4, 1, 1)  # [blocks, layers, 2, block size, heads, dim]
    >>> packed = pack_slots(kv, torch.tensor([6, 1], dtype=torch.int32))
    >>> packed.flatten().tolist()  # slot 6: key, value; slot 1: key, value
    [10.0, 14.0, 1.0, 5.0]
    >>> unpack_slots(packed, kv, torch.tensor([0, 2], dtype=torch.int32))  # the same tokens in other places
    >>> kv[0, 0, 0].flatten().tolist()
    [10.0, 1.0, 1.0, 3.0]
"""

from __future__ import annotations

import torch


def pack_slots(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gathers kv [blocks, layers, 2, block size, Hkv, D] at slots [n] (int32). Returns [n, layers, 2, Hkv, D]."""
    _check(kv, "slots", slots, kv.shape[0] * kv.shape[3])
    if kv.is_cuda:
        from rlhfspec.kernels import kv_pack_triton  # lazily: a CPU machine may lack triton

        return kv_pack_triton.pack_slots(kv, slots)
    return pack_slots_reference(kv, slots)


def unpack_slots(packed: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    """Scatters packed [n, layers, 2, Hkv, D] to slots [n] of kv; everything else stays as it is."""
    _check(kv, "slots", slots, kv.shape[0] * kv.shape[3], unique=True)
    _, num_layers, _, _, num_kv_heads, dim = kv.shape
    _check_packed(packed, kv, (len(slots), num_layers, 2, num_kv_heads, dim))
    if kv.is_cuda:
        from rlhfspec.kernels import kv_pack_triton

        kv_pack_triton.unpack_slots(packed.contiguous(), kv, slots)
    else:
        unpack_slots_reference(packed, kv, slots)


def pack_blocks(kv: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    """Gathers whole blocks [n] (int32). Returns [n, layers, 2, block size, Hkv, D]."""
    _check(kv, "block_ids", block_ids, kv.shape[0])
    if kv.is_cuda:
        from rlhfspec.kernels import kv_pack_triton

        return kv_pack_triton.pack_blocks(kv, block_ids)
    return pack_blocks_reference(kv, block_ids)


def unpack_blocks(packed: torch.Tensor, kv: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Scatters packed [n, layers, 2, block size, Hkv, D] to blocks [n] of kv; everything else stays as it is."""
    _check(kv, "block_ids", block_ids, kv.shape[0], unique=True)
    _check_packed(packed, kv, (len(block_ids), *kv.shape[1:]))
    if kv.is_cuda:
        from rlhfspec.kernels import kv_pack_triton

        kv_pack_triton.unpack_blocks(packed.contiguous(), kv, block_ids)
    else:
        unpack_blocks_reference(packed, kv, block_ids)


# ---- the twins ------------------------------------------------------------------------------------------------------


def pack_slots_reference(kv: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    block, offset = _places(kv, slots)
    return kv[block, :, :, offset].contiguous()


def unpack_slots_reference(packed: torch.Tensor, kv: torch.Tensor, slots: torch.Tensor) -> None:
    block, offset = _places(kv, slots)
    kv[block, :, :, offset] = packed


def pack_blocks_reference(kv: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
    return kv.index_select(0, block_ids.long())


def unpack_blocks_reference(packed: torch.Tensor, kv: torch.Tensor, block_ids: torch.Tensor) -> None:
    kv.index_copy_(0, block_ids.long(), packed)


def _places(kv: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    block_size = kv.shape[3]
    return slots.long() // block_size, slots.long() % block_size


# ---- checks ---------------------------------------------------------------------------------------------------------


def _check(kv: torch.Tensor, name: str, indices: torch.Tensor, limit: int, *, unique: bool = False) -> None:
    if kv.dim() != 6 or kv.shape[2] != 2 or not kv.is_contiguous():
        raise ValueError("kv: must be contiguous [blocks, layers, 2, block size, kv heads, head dim]")
    if indices.dim() != 1 or indices.dtype != torch.int32 or indices.device != kv.device:
        raise ValueError(f"{name}: must be int32 [n] on {kv.device} (got {indices.dtype} on {indices.device})")
    if len(indices) == 0:
        return
    lowest, highest = (int(value) for value in torch.stack(indices.aminmax()).tolist())
    if lowest < 0 or highest >= limit:
        raise ValueError(f"{name}: must be in [0, {limit}) (got {lowest} to {highest})")
    if unique:  # two writers of one place would leave either's bits
        ordered = indices.sort().values
        if bool((ordered[1:] == ordered[:-1]).any()):
            raise ValueError(f"{name}: must not repeat")


def _check_packed(packed: torch.Tensor, kv: torch.Tensor, shape: tuple[int, ...]) -> None:
    if packed.shape != shape or packed.dtype != kv.dtype or packed.device != kv.device:
        raise ValueError(
            f"packed: must be {shape} {kv.dtype} on {kv.device} "
            f"(got {tuple(packed.shape)} {packed.dtype} on {packed.device})"
        )
