"""Checkpoint folders: data files, and a manifest of their digests that is written last."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.training.checkpoint.shares import Written, fingerprint, merged, stored_tensors, write_part
from rlhfspec.training.checkpoint.states import unpack
from rlhfspec.training.modeling.stored import StoredTensor
from rlhfspec.training.modeling.tensor_files import sync

_SCHEMA = 1
MANIFEST = "manifest.json"
STRUCTURE = "state.json"


Writes = Callable[[Path], Sequence[Written]]  # each rank writes its files into a folder; returns the records by rank


def write_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Write a checkpoint and flush it to disk. A part given as a function (`Writes`) is written by all ranks."""
    document: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for part, value in state.items():
        written = value(folder) if callable(value) else (write_part(folder, part, value),)
        document[part] = written[0].document if len(written) == 1 else merged([one.document for one in written])
        for one in written:
            files |= one.files
    _write_json(folder / STRUCTURE, document)
    files[STRUCTURE] = fingerprint(folder / STRUCTURE)
    _write_json(folder / MANIFEST, {"schema": _SCHEMA, "step": step, "files": files})
    sync(folder)


def open_checkpoint(folder: Path, *, is_verified: bool = False) -> Any:
    """Return the state with lazy `StoredTensor`s, after verifying digests unless `is_verified`."""
    if not is_verified:
        verify(folder)
    names = [name for name in manifest_of(folder)["files"] if name.endswith(".safetensors")]
    tensors = stored_tensors([folder / name for name in names])
    return unpack(json.loads((folder / STRUCTURE).read_text()), tensors)


def read_checkpoint(folder: Path) -> Any:
    """Return the state with all tensors loaded. Tensors that shared memory share it again."""
    read: dict[int, torch.Tensor] = {}

    def whole(value: Any) -> Any:
        if isinstance(value, StoredTensor):
            if id(value) not in read:
                read[id(value)] = value.whole()
            return read[id(value)]
        if isinstance(value, dict):
            return {key: whole(item) for key, item in value.items()}
        return type(value)(map(whole, value)) if isinstance(value, (list, tuple)) else value

    return whole(open_checkpoint(folder))


def verify(folder: Path, ranks: Ranks | None = None) -> None:
    """Raise StorageError if a file is missing or differs from its digest. Each rank checks a part of the files."""
    ranks, files = ranks or Ranks(), manifest_of(folder)["files"]
    for name in sorted(files)[ranks.rank :: ranks.num_ranks]:  # shares sort first, in rank order
        path, expected = folder / name, files[name]
        if not path.is_file():
            raise StorageError(folder, f"{name} is missing")
        if fingerprint(path) != expected:
            raise StorageError(folder, f"{name} is damaged: its digest is not the manifest's")


def manifest_of(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        schema = manifest["schema"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(folder, f"its {MANIFEST} cannot be read: {error}") from error
    if schema != _SCHEMA:
        raise InvalidRequest(str(folder), schema, f"was written in another schema; this version reads {_SCHEMA}")
    files = manifest.get("files")
    if not isinstance(files, dict) or STRUCTURE not in files or not all(isinstance(f, dict) for f in files.values()):
        raise StorageError(folder, f"its {MANIFEST} does not list its files")
    assert isinstance(manifest, dict)
    return manifest


def _write_json(path: Path, document: Any) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump(document, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(path, f"cannot be written: {error}") from error
