"""Interface of weight stores, from which generators fetch the trainer's versions."""

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
    keep: int  # versions of each role
    folder: Path | None = None  # shared by the processes of a run
    stage: str = ""  # of this process
    readers: tuple[str, ...] = ()  # stages that may fetch weights from here
    trainer_address: Callable[[], str | None] = lambda: None  # host:port, if known
    peer_addresses: Callable[[], Iterable[str]] = tuple  # of all processes that may hold versions
    credentials: Path | None = None  # folder with certificates; None: no TLS
    server_name: str | None = None  # name in all certificates, if not the address


class WeightStore(Protocol):
    """Thread-safe store of the newest `keep` versions of each role."""

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        """Store a copy of a version and return the record to publish.

        Later versions are kept, because a resumed trainer stores older ones again.
        """
        ...

    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        """Return the stored tensors, which must not be modified.

        Raise WeightsVersionError if the version is not kept, StorageError if its digest differs.
        """
        ...


def weights_record(job: str, role: Role, version: int, *, uri: str, digest: str) -> Weights:
    return Weights(id=f"{job}/weights/{role}/{version}", job=job, version=version, role=role, uri=uri, digest=digest)


def not_kept(record: Weights, have: int) -> WeightsVersionError:
    return WeightsVersionError(record.version, have, f"{record.uri} is not kept")


def refuse_other(place: object, found: str, record: Weights) -> None:
    if found != record.digest:
        raise StorageError(place, f"holds weights of digest {found}, not {record.digest}")


def newest_kept(store: WeightStore, records: Iterable[Weights]) -> tuple[Weights, dict[str, torch.Tensor]] | None:
    """Return the newest record and its tensors, or None without records or if the store has only newer ones."""
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
    """Return the versions to drop, keeping the newest `keep`.

    >>> retired([1, 7, 3, 2], keep=2)
    [1, 2]
    """
    return sorted(kept)[:-keep]
