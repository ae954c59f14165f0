"""File of the drafter's learnt weights, outside checkpoints since no token depends on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from rlhfspec.errors import StorageError
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.modeling.tensor_files import read_noted, sync, write_tensors

LEARNT_FILE = "learnt.safetensors"
_VERSION, _DIGEST = "version", "digest"  # metadata keys


def write_learnt(folder: Path, version: int, tensors: Mapping[str, torch.Tensor], *, by: str) -> None:
    """Write the file atomically. `by`: the writer's name, for a temporary file. The last writer wins."""
    folder.mkdir(parents=True, exist_ok=True)
    writing = folder / f".writing-{by}"
    write_tensors(writing, tensors, notes={_VERSION: str(version), _DIGEST: digest(tensors)})
    writing.replace(folder / LEARNT_FILE)
    sync(folder)


def read_learnt(folder: Path) -> tuple[int, dict[str, torch.Tensor]] | None:
    """Return version and tensors, or None without a file. Raise StorageError if it is damaged."""
    path = folder / LEARNT_FILE
    if not path.exists():
        return None
    tensors, notes = read_noted(path)
    if notes.get(_DIGEST) != digest(tensors) or not notes.get(_VERSION, "").isdecimal():
        raise StorageError(path, "is damaged: its digest is not the recorded one")
    return int(notes[_VERSION]), tensors
