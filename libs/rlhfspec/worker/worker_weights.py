"""The weights as one process of a run has them: made at their first use; without one, torch is not imported."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.weight_stores import WEIGHT_STORES
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.records import Role, Weights, WorkerInfo
from rlhfspec.stage.base import PULL_SECONDS
from rlhfspec.stage.bus import StageBus
from rlhfspec.stage.context import kept_versions
from rlhfspec.worker.health import Health

if TYPE_CHECKING:
    import torch

    from rlhfspec.training.weights import StateDict, WeightStore
    from rlhfspec.training.weights.grpc import GrpcWeightStore
    from rlhfspec.worker.weight_group import WeightGroup

READERS = ("generator", "critic")


class WorkerWeights:
    """Implements rlhfspec.training.weights.WeightStore by the one that the run names (`choices.weight_stores`), and
    SentByRanks. Stores which serve versions to each other are known by what each worker says of itself."""

    def __init__(
        self,
        connections: Connections,
        job: RLHFJob,
        bus: StageBus,
        health: Health,
        *,
        told: Callable[[str, float], None] = lambda *_: None,
    ) -> None:
        """Make it before the gRPC server of `health` starts. `told`: called with a version's way, and its seconds."""
        self._stage = bus.stage.name
        self._connections = connections
        self._keep = kept_versions(job, self._stage)
        self._bus = bus
        self._infos: dict[tuple[str, int], WorkerInfo] = {}
        self._lock = threading.Lock()
        self._store: WeightStore | None = None
        self._served: GrpcWeightStore | None = None
        self._hearing: asyncio.Task[None] | None = None
        if WEIGHT_STORES[connections.weights].is_served and self._stage in ("trainer", *READERS):
            self._store = self._served = self._make()
            self._served.add_to(health.server)
        self.group: WeightGroup | None = None
        if self._stage in ("trainer", "generator") and job.spec.roles.generator.weights != "store":
            from rlhfspec.worker.weight_group import WeightGroup

            self.group = WeightGroup.of(connections, job, self._stage, health, self._trainer_address, told)

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        if self.group is None or role != "policy":
            return self._made().put(job, role, version, state_dict)
        with self.group.sending(role, version, state_dict) as announce:
            record = self._made().put(job, role, version, state_dict)
            announce(record)
        return record

    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        if self.group is None:
            return self._made().get(record)
        return self.group.get(record, self._made().get)

    def sent_by(self, num_ranks: int, send: Callable[[Any], list[list[str]]] | None, policy: Any) -> None:
        if self.group is not None:
            self.group.sent_by(num_ranks, send, policy)

    async def __aenter__(self) -> Self:
        if self._served is not None or self.group is not None:
            self._hearing = asyncio.create_task(self._hear())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
        if self._served is not None:
            self._served.close()
        if self.group is not None:
            self.group.close()

    def _made(self) -> WeightStore:
        with self._lock:
            if self._store is None:
                self._store = self._make()
            return self._store

    def _make(self) -> Any:
        from rlhfspec.training.weights.base import StorePlace

        connections = self._connections
        place = StorePlace(
            keep=self._keep,
            folder=connections.weights_folder,
            stage=self._stage,
            readers=READERS,
            trainer_address=self._trainer_address,
            peer_addresses=self._peer_addresses,
            credentials=connections.credentials,
            server_name=connections.worker_host,
        )
        return WEIGHT_STORES[connections.weights].load()(place)

    def _trainer_address(self) -> str | None:
        trainer = self._infos.get(("trainer", 0))
        return trainer.grpc_address if trainer else None

    def _peer_addresses(self) -> list[str]:
        others = {key: info for key, info in list(self._infos.items()) if key != (self._stage, self._bus.worker)}
        return [info.grpc_address for info in others.values() if info.stage in READERS]

    async def _hear(self) -> None:
        inbox = await self._bus.subscribe(WorkerInfo)
        while True:
            for delivery in await inbox.pull(max_records=64, timeout_seconds=PULL_SECONDS):
                self._infos[delivery.record.stage, delivery.record.worker] = delivery.record
