"""Weights within one process: a copy when put, shared by all who get them."""

from __future__ import annotations

import threading

import torch

from rlhfspec.errors import StorageError, WeightsVersionError
from rlhfspec.modeling.digest import digest
from rlhfspec.records import Role, Weights
from rlhfspec.weights.base import StateDict, retired, weights_record


class MemoryWeightStore:
    """
    Example:
        >>> store = MemoryWeightStore(keep=2)
        >>> weight = torch.zeros(2)
        >>> record = store.put("sums", "policy", 1, {"weight": weight})
        >>> _ = weight.add_(1.0)
        >>> record.uri, store.get(record)["weight"]
        ('memory:sums/policy/1', tensor([0., 0.]))
    """

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
                newest = max(versions, default=0)
                raise WeightsVersionError(record.version, newest, f"{record.uri} is not kept")
            kept, tensors = versions[record.version]
        if kept != record.digest:  # nobody else can reach the copies, so their bytes need no second hash
            raise StorageError(record.uri, f"holds weights of digest {kept}, not {record.digest}")
        return dict(tensors)


def _copy(state_dict: StateDict) -> dict[str, torch.Tensor]:
    """Tied tensors stay one, so that they are copied, kept and loaded once."""
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    result = {}
    for name, tensor in state_dict.items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.numel() or name)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        result[name] = copies[key]
    return result
