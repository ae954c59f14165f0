"""One checkpoint as a folder: its files, and a manifest with the digest of each, written last."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.training.checkpoint.states import pack, unpack
from rlhfspec.training.modeling.tensor_files import read_tensors, sync, write_tensors

_SCHEMA = 1
MANIFEST = "manifest.json"
STRUCTURE = "state.json"


def write_checkpoint(folder: Path, step: int, state: Mapping[str, Any]) -> None:
    """Everything is on the disk when this returns. A part of the state with tensors gets a file of its own."""
    for part in state:
        if not part.isidentifier():
            raise InvalidRequest("state", part, "parts of a checkpoint name its files: letters, digits, underscores")
    document, tensors = pack(dict(state))
    for part, named in _by_part(tensors).items():
        write_tensors(folder / f"{part}.safetensors", named)
    _write_json(folder / STRUCTURE, document)
    files = {path.name: _fingerprint(path) for path in sorted(folder.iterdir())}
    _write_json(folder / MANIFEST, {"schema": _SCHEMA, "step": step, "files": files})
    sync(folder)


def read_checkpoint(folder: Path) -> Any:
    """The state, after every digest has been checked."""
    names = verify(folder)
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if name.endswith(".safetensors"):
            tensors |= read_tensors(folder / name)
    return unpack(json.loads((folder / STRUCTURE).read_text()), tensors)


def verify(folder: Path) -> list[str]:
    """The names of the checkpoint's files; StorageError when one is missing, or not as it was written."""
    files = manifest_of(folder)["files"]
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            raise StorageError(folder, f"{name} is missing")
        if _fingerprint(path) != expected:
            raise StorageError(folder, f"{name} is damaged: its digest is not the manifest's")
    return list(files)


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


def _by_part(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Tensor names begin with their part's name and a dot."""
    result: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        result.setdefault(name.partition(".")[0], {})[name] = tensor
    return result


def _write_json(path: Path, document: Any) -> None:
    try:
        with path.open("w", encoding="utf-8") as file:
            json.dump(document, file, allow_nan=False)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StorageError(path, f"cannot be written: {error}") from error


def _fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "num_bytes": path.stat().st_size}
