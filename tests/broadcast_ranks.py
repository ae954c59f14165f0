"""Run by test_weights_broadcast.py, once a rank: what rank 0 puts, others get. argv: rank, number of ranks, folder."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rlhfspec.errors import StorageError, WeightsVersionError
from rlhfspec.messages.records import Weights
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.weights import broadcast
from rlhfspec.training.weights.base import weights_record
from rlhfspec.training.weights.broadcast import BroadcastWeightStore


def state(version: int) -> dict[str, torch.Tensor]:
    """Of several buckets."""
    weight = torch.arange(1000.0) + version
    return {"head": weight, "embedding": weight, "half": torch.full((7, 3), version, dtype=torch.bfloat16)}


def record_of(role: str, version: int) -> Weights:
    return weights_record("sums", role, version, uri=f"broadcast:{role}/{version}", digest=digest(state(version)))  # type: ignore[arg-type]


def lead(store: BroadcastWeightStore) -> None:
    for version in (1, 2, 3):
        for role in ("critic", "policy"):
            assert store.put("sums", role, version, state(version)) == record_of(role, version)  # type: ignore[arg-type]
    assert digest(store.get(record_of("policy", 3))) == digest(state(3))


def follow(store: BroadcastWeightStore) -> None:
    for version in (1, 2, 3):
        got = store.get(record_of("policy", version))  # the critic's comes first, and is kept
        assert digest(got) == digest(state(version))
        assert got["head"].data_ptr() == got["embedding"].data_ptr()
        assert digest(store.get(record_of("critic", version))) == digest(state(version))
    expect(StorageError, "holds weights of digest", store, replace(record_of("policy", 3), digest="00"))
    expect(WeightsVersionError, "is not kept", store, record_of("policy", 1))


def corrupted(store: BroadcastWeightStore, rank: int) -> None:
    """A bit that changes on its way."""
    if rank == 0:
        store.put("sums", "policy", 4, state(4))
        return
    broadcast_whole, calls = store._broadcast, []

    def broadcast_wrong(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        tensor = broadcast_whole(tensor)
        if len(calls) == 4:
            tensor[5] ^= 1
        return tensor

    store._broadcast = broadcast_wrong  # type: ignore[method-assign]
    expect(StorageError, "the bytes that came are not those of digest", store, record_of("policy", 4))


def expect(kind: type[Exception], text: str, store: BroadcastWeightStore, record: Weights) -> None:
    with pytest.raises(kind, match=text):
        store.get(record)


def main() -> None:
    rank, num_ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    broadcast.BUCKET_BYTES = 1000
    store = BroadcastWeightStore(keep=2)
    (lead if rank == 0 else follow)(store)
    dist.barrier()
    corrupted(store, rank)
    dist.barrier()
    if rank > 0:  # rank 0 leaves without a word
        expect(WeightsVersionError, "rank 0 does not hand it out", store, record_of("policy", 5))
    (folder / f"done-{rank}").touch()
    os._exit(0)  # as our processes end: gloo's threads, which have lost their peers, would abort one that ends slowly


if __name__ == "__main__":
    main()
