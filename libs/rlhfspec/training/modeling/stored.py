"""Tensors that lie in files, whole or as the shares of several ranks, of which as much is read as is asked for.

Example:
    >>> import tempfile
    >>> from rlhfspec.training.modeling.tensor_files import write_tensors
    >>> folder = Path(tempfile.mkdtemp())
    >>> for rank, rows in enumerate(torch.arange(6.0).reshape(3, 2).split([2, 1])):
    ...     write_tensors(folder / str(rank), {"weight": rows})
    >>> pieces = (Piece(path=folder / "0", start=0, stop=2), Piece(path=folder / "1", start=2, stop=3))
    >>> weight = StoredTensor(name="weight", shape=(3, 2), dim=0, pieces=pieces)
    >>> weight.cut(0, 1, 3)
    tensor([[2., 3.],
            [4., 5.]])
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlhfspec.errors import StorageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Where a rank's part of a tensor begins and ends along the one dimension that is cut."""

    dim: int
    start: int
    stop: int
    size: int  # of the whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a stored tensor, from `start` to `stop`, in a file."""

    path: Path
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """Cut along `dim` into pieces, which follow each other without a gap."""

    name: str  # in each of the files
    shape: tuple[int, ...]
    dim: int
    pieces: tuple[Piece, ...]

    def whole(self) -> Tensor:
        return self.cut(self.dim, 0, self.shape[self.dim])

    def cut(self, dim: int, start: int, stop: int) -> Tensor:
        """From `start` to `stop` along `dim`, on the host; of files with nothing of it nothing is read."""
        if dim != self.dim:
            return torch.cat([self._read(piece, dim, start, stop) for piece in self.pieces], self.dim)
        parts = [
            self._read(piece, dim, max(start, piece.start) - piece.start, min(stop, piece.stop) - piece.start)
            for piece in self.pieces
            if max(start, piece.start) < min(stop, piece.stop)
        ]
        if not parts:
            return self._read(self.pieces[0], dim, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def share_for(self, kept: DTensor) -> DTensor:
        """This rank's part, cut as `kept` is."""
        shape, offset = compute_local_shape_and_global_offset(kept.shape, kept.device_mesh, kept.placements)
        dim = dim_of(kept) or 0
        local = self.cut(dim, offset[dim], offset[dim] + shape[dim]).to(kept.to_local().device)
        return DTensor.from_local(
            local, kept.device_mesh, kept.placements, run_check=False, shape=kept.shape, stride=kept.stride()
        )

    def _read(self, piece: Piece, dim: int, start: int, stop: int) -> Tensor:
        try:
            with safe_open(piece.path, framework="pt") as file:
                part: Tensor = file.get_slice(self.name)[(slice(None),) * dim + (slice(start, stop),)]
                return part
        except (OSError, SafetensorError) as error:
            raise StorageError(piece.path, f"{self.name} cannot be read: {error}") from error


def dim_of(tensor: DTensor) -> int | None:
    """The dimension along which ranks share a tensor; None: each has all of it."""
    assert len(tensor.placements) == 1, "ranks are one row"
    placement = tensor.placements[0]
    return placement.dim if isinstance(placement, Shard) else None


def share_of(tensor: DTensor) -> Share | None:
    """What this rank holds of it; None: all of it."""
    dim = dim_of(tensor)
    if dim is None:
        return None
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Share(dim=dim, start=offset[dim], stop=offset[dim] + shape[dim], size=tensor.shape[dim])
