"""The weights as one process of a run has them: made at their first use, so that who needs none imports no torch."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Self

from rlhfspec.job import RLHFJob
from rlhfspec.records import Role, Weights, WorkerInfo
from rlhfspec.service.base import PULL_SECONDS
from rlhfspec.service.bus import StageBus
from rlhfspec.service.connections import Connections
from rlhfspec.service.context import kept_versions
from rlhfspec.service.health import Health

if TYPE_CHECKING:
    import torch

    from rlhfspec.weights import StateDict, WeightStore
    from rlhfspec.weights.grpc import GrpcWeightStore

READERS = ("generator", "critic")


class WorkerWeights:
    """Implements rlhfspec.weights.WeightStore: in files that all processes share or, where the run says `grpc`, from
    the trainer and from whoever has them already; these are known by what each worker says of itself."""

    def __init__(self, connections: Connections, job: RLHFJob, bus: StageBus, health: Health) -> None:
        """Before the gRPC server of `health` starts."""
        self._stage = bus.stage.name
        self._connections = connections
        self._keep = kept_versions(job)
        self._bus = bus
        self._infos: dict[tuple[str, int], WorkerInfo] = {}
        self._lock = threading.Lock()
        self._store: WeightStore | None = None
        self._grpc: GrpcWeightStore | None = None
        self._hearing: asyncio.Task[None] | None = None
        if connections.weights == "grpc" and self._stage in ("trainer", *READERS):
            self._store = self._grpc = self._over_grpc()
            self._grpc.add_to(health.server, health.grpc_address)

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        return self._made().put(job, role, version, state_dict)

    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        return self._made().get(record)

    async def __aenter__(self) -> Self:
        if self._grpc is not None:
            self._hearing = asyncio.create_task(self._hear())
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._hearing is not None:
            self._hearing.cancel()
        if self._grpc is not None:
            self._grpc.close()

    def _made(self) -> WeightStore:
        with self._lock:
            if self._store is None:
                from rlhfspec.weights import FileWeightStore

                assert self._connections.weights_folder is not None, "checked when the connections were read"
                self._store = FileWeightStore(self._connections.weights_folder, keep=self._keep)
            return self._store

    def _over_grpc(self) -> GrpcWeightStore:
        from rlhfspec.weights.grpc import GrpcWeightStore, channel_credentials

        folder = self._connections.credentials
        return GrpcWeightStore(
            keep=self._keep,
            trainer_address=None if self._stage == "trainer" else self._trainer_address,
            peer_addresses=self._peer_addresses,
            credentials=channel_credentials(folder, self._stage) if folder else None,
            readers=READERS if folder else None,
            server_name=self._connections.worker_host if folder else None,
        )

    def _trainer_address(self) -> str | None:
        trainer = self._infos.get(("trainer", 0))
        return trainer.grpc_address if trainer else None

    def _peer_addresses(self) -> list[str]:
        return [info.grpc_address for info in list(self._infos.values()) if info.stage in READERS]

    async def _hear(self) -> None:
        inbox = await self._bus.subscribe(WorkerInfo)
        while True:
            for delivery in await inbox.pull(max_records=64, timeout_seconds=PULL_SECONDS):
                self._infos[delivery.record.stage, delivery.record.worker] = delivery.record
