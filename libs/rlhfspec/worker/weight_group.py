"""Weight stores that also send policies from trainer to generators by process group (NCCL or gloo)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlhfspec.huggingface.devices import device_of, settled
from rlhfspec.huggingface.fused.casting import precision_of
from rlhfspec.job import RLHFJob
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.records import Role, Weights
from rlhfspec.messages.servers.credentials.certificates import channel_credentials
from rlhfspec.training.weights import StateDict, WeightStore
from rlhfspec.training.weights.group.messages import Wish
from rlhfspec.training.weights.group.plan import KeptAs
from rlhfspec.training.weights.group.receiver import GroupReceiver
from rlhfspec.training.weights.group.sender import GroupSender, SendingRanks
from rlhfspec.training.weights.group.ways import Ways
from rlhfspec.worker.health import Health


class SendingStore:
    def __init__(self, store: WeightStore, sender: GroupSender, ranks: SendingRanks) -> None:
        self._store = store
        self._sender = sender
        self._ranks = ranks

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        sending = self._sender.begin(role, version, state_dict, self._ranks) if role == "policy" else None
        if sending is None:
            return self._store.put(job, role, version, state_dict)
        try:
            record = self._store.put(job, role, version, state_dict)
            sending.end(record.digest)
        finally:
            sending.give_up_unless_ended()
        return record

    def get(self, record: Weights) -> dict[str, Tensor]:
        return self._store.get(record)


class ReceivingStore:
    def __init__(self, store: WeightStore, receiver: GroupReceiver, ways: Ways) -> None:
        self._store = store
        self._receiver = receiver
        self._ways = ways

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        return self._store.put(job, role, version, state_dict)

    def get(self, record: Weights) -> dict[str, Tensor]:
        if (tensors := self._receiver.take(record)) is not None:
            return tensors
        began = time.monotonic()
        tensors = self._store.get(record)
        self._ways.took("store", time.monotonic() - began)
        return tensors

    def close(self) -> None:
        self._receiver.close()


def travel_by_group(job: RLHFJob) -> bool:
    transfer = job.spec.roles.generator.weights
    return transfer == "group" or (transfer == "auto" and device_of(job.spec) != "cpu")


def group_sender(connections: Connections, job: RLHFJob, health: Health) -> GroupSender:
    """Return the trainer's sender of weights. Call it before the gRPC server of `health` starts."""
    host = health.grpc_address.rpartition(":")[0]
    askers = ("generator",) if connections.credentials else None
    sender = GroupSender(job.metadata.name, host=host, device=device_of(job.spec), askers=askers)
    sender.add_to(health.server)
    return sender


def receiving(
    store: WeightStore,
    connections: Connections,
    job: RLHFJob,
    *,
    address: str,
    trainer_address: Callable[[], str | None],
    told: Callable[[str, float], None],
) -> ReceivingStore:
    spec, folder, device = job.spec, connections.credentials, device_of(job.spec)
    is_own = spec.generation.engine.name == "own"
    narrow = is_own and settled(spec, device).generation.dtype == "bfloat16"
    on = "cpu" if spec.share_gpus else device  # NCCL allows no two processes on one GPU
    ways = Ways(spec.roles.generator.weights, told)
    receiver = GroupReceiver(
        Wish(wants=True, dtype="bfloat16" if narrow else "", device=on),
        ways,
        address=address,
        trainer_address=trainer_address,
        credentials=channel_credentials(folder, "generator") if folder else None,
        server_name=connections.worker_host,
    )
    return ReceivingStore(store, receiver, ways)


def kept_as(policy: Any) -> Callable[[str], KeptAs]:
    """Return a function from an engine's dtype to a function from parameter names to dtypes (buffers: None)."""
    return partial(_kept_as, policy)


def _kept_as(policy: Any, dtype: str) -> KeptAs:
    if dtype != "bfloat16":
        return lambda _: None
    precision = precision_of(policy, torch.bfloat16)
    names = {name for name, _ in policy.named_parameters(remove_duplicate=False)}
    return lambda name: precision.of(name) if name in names else None
