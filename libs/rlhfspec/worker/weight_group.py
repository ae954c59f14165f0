"""What a process of a run does of a group by which weights travel: the trainer sends, a generator receives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlhfspec.huggingface.devices import device_of, settled
from rlhfspec.huggingface.fused.casting import precision_of
from rlhfspec.job import RLHFJob
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.records import Role, Weights
from rlhfspec.messages.servers.credentials.certificates import channel_credentials
from rlhfspec.training.weights.group.messages import Wish
from rlhfspec.training.weights.group.plan import KeptAs
from rlhfspec.training.weights.group.receiver import GroupReceiver
from rlhfspec.training.weights.group.sender import GroupSender
from rlhfspec.training.weights.group.ways import Ways
from rlhfspec.worker.health import Health

if TYPE_CHECKING:
    from rlhfspec.training.weights import StateDict

log = logging.getLogger(__name__)
Get = Callable[[Weights], dict[str, Tensor]]


class WeightGroup:
    """A generator has a receiver, the trainer a sender."""

    def __init__(self, sender: GroupSender | None, receiver: GroupReceiver | None, ways: Ways) -> None:
        self._sender = sender
        self._receiver = receiver
        self._ways = ways

    @classmethod
    def of(
        cls,
        connections: Connections,
        job: RLHFJob,
        stage: str,
        health: Health,
        trainer_address: Callable[[], str | None],
        told: Callable[[str, float], None],
    ) -> WeightGroup | None:
        """Before the server of `health` starts; None where the job has weights go by the store."""
        spec, transfer = job.spec, job.spec.roles.generator.weights
        device = device_of(spec)
        if transfer == "store" or (transfer == "auto" and device == "cpu"):
            return None
        ways, folder = Ways(transfer, told), connections.credentials
        if stage == "trainer":
            host = health.grpc_address.rpartition(":")[0]
            askers = ("generator",) if folder else None
            sender = GroupSender(job.metadata.name, host=host, device=device, askers=askers)
            sender.add_to(health.server)
            return cls(sender, None, ways)
        is_own = spec.generation.engine.name == "own"
        narrow = is_own and settled(spec, device).generation.dtype == "bfloat16"
        on = "cpu" if spec.share_gpus else device  # NCCL takes no two processes on one GPU
        receiver = GroupReceiver(
            Wish(wants=True, dtype="bfloat16" if narrow else "", device=on),
            ways,
            address=health.grpc_address,
            trainer_address=trainer_address,
            credentials=channel_credentials(folder, stage) if folder else None,
            server_name=connections.worker_host,
        )
        return cls(None, receiver, ways)

    def sent_by(self, num_ranks: int, send: Callable[[Any], list[list[str]]] | None, policy: Any) -> None:
        """`training.weights.base.SentByRanks`, before the first version."""
        assert self._sender is not None, "it is the trainer's"
        self._sender.kept_as = partial(_kept_as, policy)
        if send is not None:
            self._sender.num_senders = num_ranks
            self._sender.send = lambda told, _: send(told)

    @contextmanager
    def sending(self, role: Role, version: int, weights: StateDict) -> Iterator[Callable[[Weights], Any]]:
        """Beside what is done within; then what is given is told the record."""
        sending = None if self._sender is None else self._sender.begin(role, version, weights)
        if sending is None:
            yield lambda _: None
            return
        try:
            yield lambda record: sending.end(record.digest)
        finally:
            sending.give_up_unless_ended()

    def get(self, record: Weights, from_store: Get) -> dict[str, Tensor]:
        """What came by the group already; else by the store, and how long that takes."""
        if self._receiver is not None and (tensors := self._receiver.take(record)) is not None:
            return tensors
        began = time.monotonic()
        tensors = from_store(record)
        self._ways.took("store", time.monotonic() - began)
        return tensors

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
        if self._sender is not None:
            self._sender.close()


def _kept_as(policy: Any, dtype: str) -> KeptAs:
    """For an engine that keeps weights in `dtype`: its parameters, and no buffers."""
    if dtype != "bfloat16":
        return lambda _: None
    precision = precision_of(policy, torch.bfloat16)
    names = {name for name, _ in policy.named_parameters(remove_duplicate=False)}
    return lambda name: precision.of(name) if name in names else None
