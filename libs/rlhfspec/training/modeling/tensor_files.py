"""Named tensors in one safetensors file, written atomically.

Tensors that share memory (tied embeddings) are stored once, and share memory again when read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rlhfspec.errors import StorageError

SAME_AS = "same_as"  # metadata: a JSON object, name -> the name it is stored under


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, notes: Mapping[str, str] | None = None) -> None:
    """Written to disk when this returns; whoever shares the folder must not read `path` before. `notes`: for whoever
    reads them with the tensors.

    Example:
        >>> import tempfile
        >>> path, weight = Path(tempfile.mkdtemp()) / "w.safetensors", torch.ones(2)
        >>> write_tensors(path, {"head": weight, "embedding": weight})
        >>> read = read_tensors(path)
        >>> read["head"] is read["embedding"], read["head"]
        (True, tensor([1., 1.]))
    """
    stored, same_as = _unshared(tensors)
    try:
        save_file(stored, path, metadata={**(notes or {}), SAME_AS: json.dumps(same_as)})
        sync(path)
    except (OSError, SafetensorError) as error:
        raise StorageError(path, f"cannot be written: {error}") from error


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """As written, on the CPU."""
    return read_noted(path)[0]


def read_noted(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors, and the notes of whoever wrote them."""
    try:
        with safe_open(path, framework="pt") as file:
            notes: dict[str, str] = file.metadata() or {}
            same_as: dict[str, str] = json.loads(notes.pop(SAME_AS, "{}"))
            tensors: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors | {name: tensors[stored] for name, stored in same_as.items()}, notes
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError) as error:
        raise StorageError(path, f"cannot be read: {error}") from error


def _unshared(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """What to store, and which names are another's tensor. safetensors refuses memory that two names share."""
    stored: dict[str, torch.Tensor] = {}
    same_as: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    storages: set[int] = set()
    for name, given in tensors.items():
        tensor = given.detach()
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            same_as[name] = first[key]
            continue
        first[key] = name
        storage = tensor.untyped_storage().data_ptr()
        stored[name] = (tensor.clone() if storage in storages else tensor).contiguous().cpu()
        storages.add(storage)
    return stored, same_as


def sync(path: Path) -> None:
    """A file's bytes, or a folder's names, are on the disk when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
