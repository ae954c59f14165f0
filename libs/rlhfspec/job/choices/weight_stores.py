"""Stores that carry weights to generators (docs/training.md). `make` takes a `training.weights.base.StorePlace`."""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec.job.choices.registry import Entry, Registry

_WEIGHTS_PACKAGE = "rlhfspec.training.weights"


@dataclass(frozen=True, kw_only=True)
class WeightStoreEntry(Entry):
    """Weight store. `needs`: required fields of `messages.access.connections.Connections`."""

    between: str  # one line, for the docs
    is_between_processes: bool = True
    is_served: bool = False  # each process that holds versions serves them from its gRPC server


WEIGHT_STORES = Registry(
    "weights",
    WeightStoreEntry(
        name="memory",
        about="one copy",
        between="all stages in one process",
        make=f"{_WEIGHTS_PACKAGE}.memory:make_store",
        is_between_processes=False,
    ),
    WeightStoreEntry(
        name="file",
        about="one file, renamed into place, mapped by readers",
        between="processes of one machine, in `/dev/shm`; any shared folder",
        make=f"{_WEIGHTS_PACKAGE}.file:make_store",
        needs=("weights_folder",),
    ),
    WeightStoreEntry(
        name="grpc",
        about="a stream from the trainer to each process",
        between="processes of several machines",
        make=f"{_WEIGHTS_PACKAGE}.grpc:make_store",
        is_served=True,
    ),
)
BETWEEN_PROCESSES = WEIGHT_STORES.where(lambda entry: entry.is_between_processes)
