"""How new weights get from the trainer to whoever runs the model: put once a step, announced as a record, fetched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from rlhfspec.errors import StorageError, WeightsVersionError
from rlhfspec.messages.records import Role, Weights

StateDict = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorePlace:
    """Everything that a process knows when it makes its store: each kind takes what it needs."""

    keep: int  # versions of each role
    folder: Path | None = None  # that the processes of a run share
    stage: str = ""  # of this process
    readers: tuple[str, ...] = ()  # stages that may have weights from here
    trainer_address: Callable[[], str | None] = lambda: None  # host:port, as far as it is known
    peer_addresses: Callable[[], Iterable[str]] = tuple  # of all that may hold versions
    credentials: Path | None = None  # folder with certificates; None: no TLS
    server_name: str | None = None  # that all certificates are for, where it is not the address


class WeightStore(Protocol):
    """Keeps the newest `keep` versions of each job's role in one run. Safe to use from several threads."""

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        """Keep a version and return the record to publish. The tensors are copied: the caller may train them in place.

        Later versions stay: a trainer that came back at its last checkpoint puts again what others are ahead of.
        """
        ...

    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        """Return the tensors as they were put, for reading only: load them into a module, never change them.

        WeightsVersionError when that version is no longer, or not yet, kept; StorageError when it is not what the
        record's digest says.
        """
        ...


def weights_record(job: str, role: Role, version: int, *, uri: str, digest: str) -> Weights:
    """
    >>> weights_record("sums", "policy", 3, uri="memory:sums/policy/3", digest="ab").id
    'sums/weights/policy/3'
    """
    return Weights(id=f"{job}/weights/{role}/{version}", job=job, version=version, role=role, uri=uri, digest=digest)


def identity(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that tied names share. Empty tensors, which have no memory, have a key each."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.numel() or name


def not_kept(record: Weights, have: int) -> WeightsVersionError:
    """Return the error for a version that is not kept. `have`: the newest one that is."""
    return WeightsVersionError(record.version, have, f"{record.uri} is not kept")


def refuse_other(place: object, found: str, record: Weights) -> None:
    """Raise StorageError where weights of the digest `found` are not those of the record."""
    if found != record.digest:
        raise StorageError(place, f"holds weights of digest {found}, not {record.digest}")


def newest_kept(store: WeightStore, records: Iterable[Weights]) -> tuple[Weights, dict[str, torch.Tensor]] | None:
    """Return the newest of these versions and its tensors; None when there is none, or a newer one has replaced it:
    a reader that was busy for several steps skips them, and the newer record is on its way."""
    newest = max(records, key=lambda record: record.version, default=None)
    if newest is None:
        return None
    try:
        return newest, store.get(newest)
    except WeightsVersionError as error:
        if error.have <= newest.version:
            raise
        return None


def retired(kept: Collection[int], keep: int) -> list[int]:
    """Return the versions to drop.

    >>> retired([1, 7, 3, 2], keep=2)
    [1, 2]
    """
    return sorted(kept)[:-keep]
