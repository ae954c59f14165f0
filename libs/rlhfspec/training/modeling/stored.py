"""Tensors in files, whole or in shares of ranks, read only as needed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rlhfspec.errors import StorageError

Place = tuple[int, ...]  # a number for each dimension


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Range of a tensor parallel rank's part along the cut dimension."""

    dim: int
    start: int
    stop: int
    size: int  # of the whole tensor


@dataclass(frozen=True, slots=True)
class PartOf:
    """A tensor parallel rank's part of a weight or of its optimizer state."""

    tensor: Tensor
    share: Share

    @property
    def shape(self) -> torch.Size:
        return whole_shape(self.tensor.shape, self.share)


def whole_shape(shape: Place, share: Share | None) -> torch.Size:
    if share is None:
        return torch.Size(shape)
    return torch.Size([*shape[: share.dim], share.size, *shape[share.dim + 1 :]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    path: Path
    start: Place
    shape: Place

    def has(self, place: Place) -> bool:
        return all(s <= p < s + n for s, p, n in zip(self.start, place, self.shape, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    name: str  # in each of the files
    shape: Place
    pieces: tuple[Piece, ...]

    def missing(self) -> Place | None:
        if sum(math.prod(piece.shape) for piece in self.pieces) == math.prod(self.shape):
            return None  # ranks never write the same place
        borders = [
            sorted({0} | {piece.start[dim] + piece.shape[dim] for piece in self.pieces} - {size})
            for dim, size in enumerate(self.shape)
        ]
        return next((place for place in product(*borders) if not any(piece.has(place) for piece in self.pieces)), None)

    def whole(self) -> Tensor:
        return self.cut((0,) * len(self.shape), self.shape)

    def cut(self, start: Place, shape: Place) -> Tensor:
        """Read the block of `shape` at `start` into host memory, from only the files needed."""
        result: Tensor | None = None
        for piece, within, at, size in self._overlaps(start, shape):
            part = self._read(piece, within, size)
            if size == tuple(shape):
                return part
            result = part.new_empty(shape) if result is None else result
            result[tuple(slice(a, a + n) for a, n in zip(at, size, strict=True))] = part
        return (
            self._read(self.pieces[0], (0,) * len(shape), (0,) * len(shape)).reshape(shape)
            if result is None
            else result
        )

    def _overlaps(self, start: Place, shape: Place) -> Iterator[tuple[Piece, Place, Place, Place]]:
        """Yield each piece that overlaps the block, the overlap's start in piece and block, and its shape."""
        for piece in self.pieces:
            first = tuple(map(max, start, piece.start))
            size = tuple(
                min(s + n, ps + pn) - f
                for s, n, ps, pn, f in zip(start, shape, piece.start, piece.shape, first, strict=True)
            )
            if min(size) > 0:
                within, at = (
                    tuple(f - o for f, o in zip(first, origin, strict=True)) for origin in (piece.start, start)
                )
                yield piece, within, at, size

    def part_for(self, kept: Tensor, share: Share | None) -> Tensor:
        start, shape = place_of(kept, share)
        local = self.cut(start, shape)
        if not isinstance(kept, DTensor):
            return local
        return DTensor.from_local(
            local.to(kept.to_local().device), kept.device_mesh, kept.placements, run_check=False, shape=kept.shape,
            stride=kept.stride(),
        )  # fmt: skip

    def _read(self, piece: Piece, start: Place, shape: Place) -> Tensor:
        try:
            with safe_open(piece.path, framework="pt") as file:
                where = tuple(slice(s, s + n) for s, n in zip(start, shape, strict=True))
                part: Tensor = file.get_slice(self.name)[where]
                return part
        except (OSError, SafetensorError) as error:
            raise StorageError(piece.path, f"{self.name} cannot be read: {error}") from error


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def is_shared(tensor: DTensor) -> bool:
    assert len(tensor.placements) == 1, "ranks are one row"
    return isinstance(tensor.placements[0], Shard)


def place_of(tensor: Tensor, share: Share | None = None) -> tuple[Place, Place]:
    """Return the start of this rank's part in the whole, and its shape."""
    shape, start = tuple(tensor.shape), (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        found = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        shape, start = (tuple(map(int, each)) for each in found)
    if share is not None:
        start = (*start[: share.dim], start[share.dim] + share.start, *start[share.dim + 1 :])
    return start, shape
