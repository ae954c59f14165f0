"""Weight store within one process: copied when put, shared by readers."""

from __future__ import annotations

import threading

import torch

from rlhfspec.messages.records import Role, Weights
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.modeling.tensor_files import unshared
from rlhfspec.training.weights.base import StateDict, StorePlace, not_kept, refuse_other, retired, weights_record


class MemoryWeightStore:
    def __init__(self, *, keep: int) -> None:
        assert keep >= 1
        self._keep = keep
        self._lock = threading.Lock()
        self._versions: dict[tuple[str, Role], dict[int, tuple[str, dict[str, torch.Tensor]]]] = {}

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        tensors = _copy(state_dict)
        record = weights_record(job, role, version, uri=f"memory:{job}/{role}/{version}", digest=digest(tensors))
        with self._lock:
            versions = self._versions.setdefault((job, role), {})
            versions[version] = (record.digest, tensors)
            for old in retired(versions, self._keep):
                del versions[old]
        return record

    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        with self._lock:
            versions = self._versions.get((record.job, record.role), {})
            if record.version not in versions:
                raise not_kept(record, max(versions, default=0))
            kept, tensors = versions[record.version]
        refuse_other(record.uri, kept, record)  # only this process can reach the copies, so no second hash is needed
        return dict(tensors)


def _copy(state_dict: StateDict) -> dict[str, torch.Tensor]:
    stored, same_as = unshared(state_dict)
    copies = {name: tensor.to("cpu", copy=True) for name, tensor in stored.items()}
    return {name: copies[same_as.get(name, name)] for name in state_dict}


def make_store(place: StorePlace) -> MemoryWeightStore:
    return MemoryWeightStore(keep=place.keep)
