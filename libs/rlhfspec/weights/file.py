"""Weights between processes that share a file system: one safetensors file a version, renamed into place."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from rlhfspec.errors import StorageError, WeightsVersionError
from rlhfspec.modeling.digest import digest
from rlhfspec.modeling.tensor_files import read_tensors, sync, write_tensors
from rlhfspec.records import Role, Weights
from rlhfspec.weights.base import StateDict, retired, weights_record

SCHEME = "file:"


class FileWeightStore:
    """`folder`: one for each run.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> record = FileWeightStore(folder, keep=2).put("sums", "critic", 4, {"weight": torch.ones(2)})
        >>> Path(record.uri.removeprefix(SCHEME)).name, FileWeightStore(folder, keep=2).get(record)
        ('sums-critic-4.safetensors', {'weight': tensor([1., 1.])})
    """

    def __init__(self, folder: Path, *, keep: int) -> None:
        assert keep >= 1
        self._folder = folder.absolute()
        self._keep = keep
        self._folder.mkdir(parents=True, exist_ok=True)

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        path = self._folder / f"{job}-{role}-{version}.safetensors"
        writing = path.with_suffix(f".{os.getpid()}.writing")
        try:
            write_tensors(writing, state_dict)
            writing.replace(path)
            sync(self._folder)
        finally:
            writing.unlink(missing_ok=True)
        for old in retired(self._kept(job, role), self._keep):
            (self._folder / f"{job}-{role}-{old}.safetensors").unlink(missing_ok=True)
        return weights_record(job, role, version, uri=f"{SCHEME}{path}", digest=digest(state_dict))

    def _kept(self, job: str, role: Role) -> list[int]:
        versions = (
            path.stem.removeprefix(f"{job}-{role}-") for path in self._folder.glob(f"{job}-{role}-*.safetensors")
        )
        return sorted(int(version) for version in versions if version.isdecimal())

    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        path = Path(record.uri.removeprefix(SCHEME))
        if not path.exists():
            newest = max(self._kept(record.job, record.role), default=0)
            raise WeightsVersionError(record.version, newest, f"{record.uri} is not kept")
        tensors = read_tensors(path)
        if (found := digest(tensors)) != record.digest:
            raise StorageError(path, f"holds weights of digest {found}, not {record.digest}")
        return tensors
