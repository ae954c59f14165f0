"""Named tensors in one safetensors file. Tensors that share memory are stored once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES

from rlhfspec.errors import StorageError

SAME_AS = "same_as"  # metadata: a JSON object, name -> the name it is stored under
_TYPE_IDS = {dtype: name for name, dtype in _TYPES.items()}
_CHUNK_BYTES = 16 << 20  # copied from a device at a time


def write_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    notes: Mapping[str, str] | None = None,
    wrote: Callable[[list[str], int, int], None] | None = None,
) -> None:
    """Write tensors and text notes to disk. Do not read `path` before this returns.

    wrote: callback after each tensor with its names, start byte and end byte.
    """
    stored, same_as = unshared(tensors)
    header = _header(stored, {**(notes or {}), SAME_AS: json.dumps(same_as)})
    try:
        with path.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for name in _in_order(stored):
                begin = file.tell()
                _write_bytes(file, stored[name])
                if wrote is not None:
                    file.flush()
                    wrote([name, *(other for other, one in same_as.items() if one == name)], begin, file.tell())
        sync(path)
    except OSError as error:
        raise StorageError(path, f"cannot be written: {error}") from error


def _in_order(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Sort names by element size, largest first, for alignment."""
    return sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))


def _header(tensors: Mapping[str, torch.Tensor], notes: Mapping[str, str]) -> bytes:
    described: dict[str, object] = {"__metadata__": notes}
    start = 0
    for name in _in_order(tensors):
        tensor = tensors[name]
        stop = start + tensor.nbytes
        described[name] = {"dtype": _TYPE_IDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    return text.ljust((len(text) + 7) // 8 * 8)


def _write_bytes(file: BinaryIO, tensor: torch.Tensor) -> None:
    """Write a tensor's bytes, from a device in chunks."""
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for start in range(0, flat.numel(), _CHUNK_BYTES):
        file.write(flat[start : start + _CHUNK_BYTES].cpu().numpy().data)


def read_noted(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            notes: dict[str, str] = file.metadata() or {}
            same_as: dict[str, str] = json.loads(notes.pop(SAME_AS, "{}"))
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors | {name: tensors[stored] for name, stored in same_as.items()}, notes
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise StorageError(path, f"cannot be read: {error}") from error


def unshared(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the distinct tensors, and the stored name of each alias."""
    stored: dict[str, torch.Tensor] = {}
    same_as: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, given in tensors.items():
        tensor = given.detach()
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            same_as[name] = first[key]
            continue
        first[key] = name
        stored[name] = tensor
    return stored, same_as


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
