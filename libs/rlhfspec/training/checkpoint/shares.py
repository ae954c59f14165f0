"""A part of a checkpoint in files: of one rank in one file, of several in one each, which any number can read again.

    learner.safetensors                  what one rank alone has, and what all have alike
    learner-00001-of-00004.safetensors   the shares of rank 1 of 4

Nothing is gathered: each rank writes what it holds, and notes in its file which part of the whole that is. Who reads
gets each tensor as a `StoredTensor`, of which it takes what it needs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.tensor import DTensor

from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.training.checkpoint.states import pack
from rlhfspec.training.learning.distributed import Ranks
from rlhfspec.training.modeling.stored import Piece, Share, StoredTensor, share_of
from rlhfspec.training.modeling.tensor_files import SAME_AS, write_tensors

LEARNER = "learner"  # the part of a checkpoint that is the learner's state
_SHARES = "shares"  # the note: a JSON object, name -> Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What one rank wrote of a part: the document that names its tensors, and its files with the digest of each."""

    document: Any
    files: dict[str, dict[str, Any]] = field(default_factory=dict)


def write_part(
    folder: Path, part: str, state: Any, *, rank: int = 0, num_ranks: int = 1, leads: bool = True
) -> Written:
    """Everything is on the disk when this returns. leads: writes what all ranks have alike too.

    Example:
        >>> import tempfile
        >>> written = write_part(Path(tempfile.mkdtemp()), "policy", {"weight": torch.ones(2)})
        >>> written.document, list(written.files)
        ({'weight': {'$tensor': 'policy.weight'}}, ['policy.safetensors'])
    """
    if not part.isidentifier():
        raise InvalidRequest("state", part, "parts of a checkpoint name its files: letters, digits, underscores")
    document, tensors = pack({part: state})
    of_rank = f"-{rank:05d}-of-{num_ranks:05d}"
    alike = {name: tensor for name, tensor in tensors.items() if not isinstance(tensor, DTensor)} if leads else {}
    own: dict[str, torch.Tensor] = {}
    shares: dict[str, Share] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            share = share_of(tensor)
            if share is None and leads:
                alike[name] = tensor.to_local()
            elif share is not None and share.start < share.stop:
                own[name], shares[name] = tensor.to_local(), share
    assert not (rank and alike and own), "a rank that shares does not lead"
    files = {}
    notes = {_SHARES: json.dumps({name: asdict(share) for name, share in shares.items()})}
    for name, named, noted in ((of_rank if rank else "", alike, {}), (of_rank, own, notes)):
        if named:
            path = folder / f"{part}{name}.safetensors"
            write_tensors(path, named, notes=noted)
            files[path.name] = fingerprint(path)
    return Written(document=document[part], files=files)


def write_learner(folder: Path, state: Any, ranks: Ranks, leads: bool) -> Written:
    """What a rank has of the learner's state (`learning.distributed.Write`)."""
    return write_part(folder, LEARNER, state, rank=ranks.rank, num_ranks=ranks.num_ranks, leads=leads)


def merged(documents: Sequence[Any]) -> Any:
    """What each rank has of one dictionary, as one.

    >>> merged([{"version": 1, "policy": {}}, {"version": 1, "critic": {}}])
    {'version': 1, 'policy': {}, 'critic': {}}
    """
    whole: dict[str, Any] = {}
    for document in documents:
        for name, value in document.items():
            whole.setdefault(name, value)
    return whole


def stored_tensors(paths: Sequence[Path]) -> dict[str, torch.Tensor | StoredTensor]:
    """All that files hold, by name; what is a single number is read at once. StorageError where a share is missing."""
    result: dict[str, torch.Tensor | StoredTensor] = {}
    pieces: dict[str, list[tuple[Share, Piece, tuple[int, ...]]]] = {}
    for path in paths:
        try:
            _look_into(path, result, pieces)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(path, f"cannot be read: {error}") from error
    return result | {name: _joined(name, found) for name, found in pieces.items()}


def _look_into(
    path: Path,
    result: dict[str, torch.Tensor | StoredTensor],
    pieces: dict[str, list[tuple[Share, Piece, tuple[int, ...]]]],
) -> None:
    with safe_open(path, framework="pt") as file:
        notes = file.metadata() or {}
        shares: Mapping[str, Any] = json.loads(notes.get(_SHARES, "{}"))
        for name in file.keys():  # noqa: SIM118
            shape = tuple(file.get_slice(name).get_shape())
            if not shape:
                result[name] = file.get_tensor(name)
            elif name in shares:
                share = Share(**shares[name])
                pieces.setdefault(name, []).append((share, Piece(path=path, start=share.start, stop=share.stop), shape))
            else:
                piece = Piece(path=path, start=0, stop=shape[0])
                result[name] = StoredTensor(name=name, shape=shape, dim=0, pieces=(piece,))
        for name, other in json.loads(notes.get(SAME_AS, "{}")).items():
            result[name] = result[other]


def _joined(name: str, found: list[tuple[Share, Piece, tuple[int, ...]]]) -> StoredTensor:
    """One tensor of its shares, whatever the order of the files."""
    found.sort(key=lambda each: each[1].start)
    share, _, shape = found[0]
    reached = 0
    for _, piece, _ in found:
        if piece.start != reached:
            break
        reached = piece.stop
    if reached != share.size:
        at = found[0][1].path.parent
        raise StorageError(at, f"the share of {name} from {reached} of {share.size} on is missing")
    whole = (*shape[: share.dim], share.size, *shape[share.dim + 1 :])
    return StoredTensor(name=name, shape=whole, dim=share.dim, pieces=tuple(piece for _, piece, _ in found))


def fingerprint(path: Path) -> dict[str, Any]:
    """What the manifest says of a file."""
    with path.open("rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "num_bytes": path.stat().st_size}
