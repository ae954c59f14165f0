"""Weights of one process. The store, and with it torch, is loaded at first use."""

from __future__ import annotations

import asyncio
import threading
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

READERS = ("generator", "critic")


class WorkerWeights:
    """WeightStore of the configured kind, which finds its peers by WorkerInfo records."""

    def __init__(self, connections: Connections, job: RLHFJob, bus: StageBus, health: Health) -> None:
        """Create it before the gRPC server of `health` starts, which may serve it."""
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

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        return self._made().put(job, role, version, state_dict)

    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        return self._made().get(record)

    def trainer_address(self) -> str | None:
        trainer = self._infos.get(("trainer", 0))
        return trainer.grpc_address if trainer else None

    async def __aenter__(self) -> Self:
        if self._stage in READERS:
            self._hearing = asyncio.create_task(self._hear())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
        if self._served is not None:
            self._served.close()

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
            trainer_address=self.trainer_address,
            peer_addresses=self._peer_addresses,
            credentials=connections.credentials,
            server_name=connections.worker_host,
        )
        return WEIGHT_STORES[connections.weights].load()(place)

    def _peer_addresses(self) -> list[str]:
        others = {key: info for key, info in list(self._infos.items()) if key != (self._stage, self._bus.worker)}
        return [info.grpc_address for info in others.values() if info.stage in READERS]

    async def _hear(self) -> None:
        inbox = await self._bus.subscribe(WorkerInfo)
        while True:
            for delivery in await inbox.pull(max_records=64, timeout_seconds=PULL_SECONDS):
                self._infos[delivery.record.stage, delivery.record.worker] = delivery.record
