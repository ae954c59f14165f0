"""Sharded checkpoint files, one per rank, readable by any number of ranks.

    learner.safetensors                  replicated values
    learner-00001-of-00004.safetensors   shares of rank 1 of 4

Ranks write without gathering, and record each share's offset in the whole tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.training.checkpoint.states import pack
from rlhfspec.training.modeling.stored import PartOf, Piece, StoredTensor, is_shared, local_of, place_of, whole_shape
from rlhfspec.training.modeling.tensor_files import SAME_AS, write_tensors

LEARNER = "learner"  # the part of a checkpoint that is the learner's state
_SHARES = "shares"  # the note: a JSON object, name -> start in the whole, and the whole's shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    document: Any
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


def write_part(folder: Path, part: str, state: Any, *, ranks: Ranks | None = None, leads: bool = True) -> Written:
    """Write this rank's share of a checkpoint part to disk. leads: also write values that all ranks share."""
    if not part.isidentifier():
        raise InvalidRequest("state", part, "must be letters, digits, underscores: it becomes part of a file name")
    ranks = ranks or Ranks()
    document, tensors = pack({part: state})
    of_rank = f"-{ranks.rank:05d}-of-{ranks.num_ranks:05d}"
    alike: dict[str, torch.Tensor] = {}
    own: dict[str, torch.Tensor] = {}
    noted: dict[str, Any] = {}
    for name, value in tensors.items():
        tensor, share = (value.tensor, value.share) if isinstance(value, PartOf) else (value, None)
        local = local_of(tensor)
        if share is None and not (isinstance(tensor, DTensor) and is_shared(tensor)):
            alike |= {name: local} if leads else {}
        elif local.numel() and (share is not None or ranks.has_the_whole_layer):
            own[name] = local
            noted[name] = {"start": place_of(tensor, share)[0], "whole": whole_shape(tensor.shape, share)}
    assert not (ranks.rank and alike and own), "a rank that shares does not lead"
    files = {}
    for name, named, notes in (
        (of_rank if ranks.rank else "", alike, {}), (of_rank, own, {_SHARES: json.dumps(noted)}),
    ):  # fmt: skip
        if named:
            path = folder / f"{part}{name}.safetensors"
            write_tensors(path, named, notes=notes)
            files[path.name] = fingerprint(path)
    return Written(document=document[part], files=files)


def merged(documents: Sequence[Any]) -> Any:
    whole: dict[str, Any] = {}
    for document in documents:
        for name, value in document.items():
            whole.setdefault(name, value)
    return whole


def stored_tensors(paths: Sequence[Path]) -> dict[str, torch.Tensor | StoredTensor]:
    """Return the files' tensors by name. Raise StorageError if a share is missing."""
    result: dict[str, torch.Tensor | StoredTensor] = {}
    for path in paths:
        try:
            _look_into(path, result)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(path, f"cannot be read: {error}") from error
    for stored in result.values():
        if isinstance(stored, StoredTensor) and (place := stored.missing()) is not None:
            problem = f"the share of {stored.name} that begins at {list(place)} of {list(stored.shape)} is missing"
            raise StorageError(stored.pieces[0].path.parent, problem)
    return result


def _look_into(path: Path, result: dict[str, torch.Tensor | StoredTensor]) -> None:
    with safe_open(path, framework="pt") as file:
        notes = file.metadata() or {}
        shares: Mapping[str, Any] = json.loads(notes.get(_SHARES, "{}"))
        for name in file.keys():  # noqa: SIM118
            shape = tuple(file.get_slice(name).get_shape())
            if not shape:
                result[name] = file.get_tensor(name)
                continue
            note = shares.get(name, {"start": (0,) * len(shape), "whole": shape})
            piece = Piece(path=path, start=tuple(note["start"]), shape=shape)
            known = result.get(name)
            others = known.pieces if isinstance(known, StoredTensor) else ()
            result[name] = StoredTensor(name=name, shape=tuple(note["whole"]), pieces=(*others, piece))
        for name, other in json.loads(notes.get(SAME_AS, "{}")).items():
            result[name] = result[other]


def fingerprint(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "num_bytes": path.stat().st_size}
