"""Weight store on a shared file system: one safetensors file per version, renamed into place.

Readers map the file, which stays valid after it is unlinked. They check that its stored sha256 is the record's and its
stored xxh3_128 fits its bytes, or else compare the bytes' own sha256 with the record. Since xxh3_128 can be forged, all
writers in the folder must be trusted.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import torch

from rlhfspec.errors import StorageError
from rlhfspec.messages.records import Role, Weights
from rlhfspec.training.modeling.digest import (
    SHA256,
    XXH3,
    HashedTensor,
    checksum,
    combined,
    digest,
    hash_of,
    hashing_threads,
)
from rlhfspec.training.modeling.tensor_files import read_noted, sync, write_tensors
from rlhfspec.training.weights.base import StateDict, StorePlace, not_kept, refuse_other, retired, weights_record

_FILE_SCHEME = "file:"
SUFFIX = ".safetensors"
HASHES = "hashes"  # note with digest and checksum
NOT_YET_HASHED = "?" * 97  # as long as digest and checksum
WRITING = ".writing"  # an unfinished version, or one of a killed process


class FileWeightStore:
    """Store of weights in `folder`, one folder per run."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        assert keep >= 1
        self._folder = folder.absolute()
        self._keep = keep
        self._right: dict[tuple[Path, str], tuple[int, ...]] = {}  # by path and digest: identity of a verified file
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        path = self._path(job, role, version)
        gone = [old for old in retired({*self._kept(job, role), version}, self._keep) if old != version]
        self._remove(self._path(job, role, old) for old in gone)  # first, to free their memory for the new one
        self._remove(self._numbered(job, role, WRITING))
        writing = path.with_suffix(f".{os.getpid()}{WRITING}")
        try:
            hashes = _written(writing, state_dict)
            _note(writing, hashes)
            writing.replace(path)
            sync(self._folder)
        finally:
            writing.unlink(missing_ok=True)
        if version in retired(self._kept(job, role), self._keep):
            self._remove([path])
        return weights_record(job, role, version, uri=f"{_FILE_SCHEME}{path}", digest=hashes[0])

    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        path = Path(record.uri.removeprefix(_FILE_SCHEME))
        try:
            file = path.stat()
            tensors, notes = read_noted(path)
        except (FileNotFoundError, StorageError) as error:
            if isinstance(error, StorageError) and path.exists():
                raise
            newest = max(self._kept(record.job, record.role), default=0)
            raise not_kept(record, newest) from error
        this = (file.st_ino, file.st_size, file.st_mtime_ns)
        if self._right.get((path, record.digest)) != this:
            if notes.get(HASHES) != f"{record.digest} {checksum(tensors)}":
                refuse_other(path, digest(tensors), record)
            self._right = {key: value for key, value in self._right.items() if key[0].exists()}
            self._right[path, record.digest] = this
        return tensors

    def _path(self, job: str, role: Role, version: int) -> Path:
        return self._folder / f"{job}-{role}-{version}{SUFFIX}"

    def _kept(self, job: str, role: Role) -> list[int]:
        found = self._numbered(job, role, SUFFIX)
        return sorted(int(path.stem.removeprefix(f"{job}-{role}-")) for path in found)

    def _numbered(self, job: str, role: Role, suffix: str) -> list[Path]:
        prefix = f"{job}-{role}-"
        found = self._folder.glob(f"{prefix}*{suffix}")
        return [path for path in found if path.name.removeprefix(prefix).split(".")[0].isdecimal()]

    def _remove(self, paths: Iterable[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)


def _written(path: Path, state_dict: StateDict) -> list[str]:
    """Write tensors, hash them meanwhile, and return the file's sha256 digest and xxh3_128 checksum."""
    found: dict[str, Future[tuple[bytes, bytes]]] = {}
    with hashing_threads() as threads:

        def hash_beside(names: list[str], begin: int, end: int) -> None:
            found.update(dict.fromkeys(names, threads.submit(_hashes, path, begin, end)))

        write_tensors(path, state_dict, notes={HASHES: NOT_YET_HASHED}, wrote=hash_beside)
        hashes = {name: future.result() for name, future in found.items()}
    return [
        combined(new, (HashedTensor.of(name, tensor, hashes[name][place]) for name, tensor in state_dict.items()))
        for place, new in enumerate((SHA256, XXH3))
    ]


def _hashes(path: Path, begin: int, end: int) -> tuple[bytes, bytes]:
    if begin == end:
        return hash_of(SHA256, b""), hash_of(XXH3, b"")
    page = begin - begin % mmap.ALLOCATIONGRANULARITY
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), end - page, offset=page, prot=mmap.PROT_READ) as mapped,
        memoryview(mapped) as whole,
        whole[begin - page :] as part,
    ):
        return hash_of(SHA256, part), hash_of(XXH3, part)


def _note(path: Path, hashes: Iterable[str]) -> None:
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        at = file.read(size).index(f'"{HASHES}":"{NOT_YET_HASHED}"'.encode())
        file.seek(8 + at)
        file.write(f'"{HASHES}":"{" ".join(hashes)}"'.encode())
    sync(path)


def make_store(place: StorePlace) -> FileWeightStore:
    assert place.folder is not None, "checked when the connections were read"
    return FileWeightStore(place.folder, keep=place.keep)
