"""Weight store over gRPC: receivers fetch versions from the trainer's memory or from a peer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable

import grpc
import torch

from rlhfspec.messages.records import Role, Weights
from rlhfspec.messages.servers.credentials.certificates import channel_credentials
from rlhfspec.training.weights.base import StateDict, StorePlace, not_kept, refuse_other, weights_record
from rlhfspec.training.weights.grpc_client import GrpcWeightClient
from rlhfspec.training.weights.grpc_fetch import Fetch
from rlhfspec.training.weights.grpc_server import GrpcWeightServer, KeptVersions, Key
from rlhfspec.training.weights.packed import PackedWeights, machine_memory, pack

__all__ = ["GrpcWeightStore", "channel_credentials"]
_GRPC_SCHEME = "grpc:"
_STALL_SECONDS = 5.0
_FETCH_SECONDS = 60.0  # long enough for a restart of the trainer


class GrpcWeightStore:
    """Store of weights versions served over gRPC.

    `trainer_address`: returns host:port, or None while unknown; omitted for the trainer's own store. `peer_addresses`:
    returns processes that may have versions. `credentials`: for TLS. `server_name`: name in certificates, if not the
    address. `readers`: certificate roles that may fetch, None for all. `max_bytes`: per version, default all memory.
    """

    def __init__(
        self,
        *,
        keep: int,
        trainer_address: Callable[[], str | None] | None = None,
        peer_addresses: Callable[[], Iterable[str]] = tuple,
        credentials: grpc.ChannelCredentials | None = None,
        server_name: str | None = None,
        readers: Collection[str] | None = None,
        max_bytes: int | None = None,
        fetch_seconds: float = _FETCH_SECONDS,
        stall_seconds: float = _STALL_SECONDS,
    ) -> None:
        self._trainer_address = trainer_address
        self._peer_addresses = peer_addresses
        self._fetch_seconds = fetch_seconds
        self._closed = threading.Event()
        self._kept = KeptVersions(keep)
        self._fetching: dict[Key, threading.Lock] = {}
        self._server = GrpcWeightServer(self._kept, readers=readers)
        self.sent, self.refused = self._server.sent, self._server.refused
        self._client = GrpcWeightClient(
            credentials=credentials,
            server_name=server_name,
            max_bytes=machine_memory() if max_bytes is None else max_bytes,
            stall_seconds=stall_seconds,
            closed=self._closed,
            buffers=self._kept.buffers,
        )

    def add_to(self, server: grpc.Server) -> None:
        self._server.add_to(server)

    def close(self) -> None:
        """Make waiting `get` calls raise WeightsVersionError within a second."""
        self._closed.set()

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        key = (job, role, version)
        self._kept.make_room(key)
        packed = pack(job, role, version, state_dict, self._kept.buffers)
        self._kept.add(key, packed)
        return weights_record(job, role, version, uri=f"{_GRPC_SCHEME}{role}/{version}", digest=packed.header.digest)

    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        key = (record.job, record.role, record.version)
        packed = self._kept.find(key) or self._fetched(key, record)
        refuse_other(record.uri, packed.header.digest, record)
        return packed.tensors()

    def _fetched(self, key: Key, record: Weights) -> PackedWeights:
        """Fetch a version once for all threads that want it."""
        if self._trainer_address is None:
            raise not_kept(record, self._kept.newest(record.job, record.role))
        fetch = Fetch(
            record,
            self._client,
            trainer_address=self._trainer_address,
            peer_addresses=self._peer_addresses,
            wait_seconds=self._fetch_seconds,
        )
        with self._fetching.setdefault(key, threading.Lock()):
            packed = self._kept.find(key)
            if packed is None:
                self._kept.make_room(key)
                packed = fetch.run()
                self._kept.add(key, packed)
        self._fetching.pop(key, None)
        return packed


def make_store(place: StorePlace) -> GrpcWeightStore:
    folder = place.credentials
    return GrpcWeightStore(
        keep=place.keep,
        trainer_address=None if place.stage == "trainer" else place.trainer_address,
        peer_addresses=place.peer_addresses,
        credentials=channel_credentials(folder, place.stage) if folder else None,
        readers=place.readers if folder else None,
        server_name=place.server_name if folder else None,
    )
