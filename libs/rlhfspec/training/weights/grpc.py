"""Weights between machines: the trainer keeps versions in memory, and whoever needs one takes it over gRPC, from the
trainer or from a peer that has it already or is just receiving it.

Example, trainer and receiver in one process:
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import grpc
    >>> trainer = GrpcWeightStore(keep=2)
    >>> server = grpc.server(ThreadPoolExecutor(8))
    >>> address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    >>> trainer.add_to(server, address)
    >>> server.start()
    >>> record = trainer.put("sums", "policy", 1, {"weight": torch.ones(2)})
    >>> generator = GrpcWeightStore(keep=2, trainer_address=lambda: address)
    >>> record.uri, generator.get(record)
    ('grpc:policy/1', {'weight': tensor([1., 1.])})
    >>> generator.close(), trainer.close(), server.stop(None).wait()
    (None, None, True)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import grpc
import torch

from rlhfspec.common.awake_clock import AwakeClock
from rlhfspec.errors import WeightsVersionError
from rlhfspec.messages.records import Role, Weights
from rlhfspec.messages.servers.credentials.certificates import channel_credentials
from rlhfspec.training.weights.base import StateDict, StorePlace, not_kept, weights_record
from rlhfspec.training.weights.grpc_client import TICK_SECONDS, GrpcWeightClient, Patience
from rlhfspec.training.weights.grpc_fetch import Fetch
from rlhfspec.training.weights.grpc_server import GrpcWeightServer
from rlhfspec.training.weights.kept import KeptVersions, Version
from rlhfspec.training.weights.packed import machine_memory

__all__ = ["GrpcWeightStore", "channel_credentials"]
_SCHEME = "grpc:"
_STALL_SECONDS = 5.0  # five signs of life that did not come
_FETCH_SECONDS = 60.0  # a trainer that is restarted is back by then


class GrpcWeightStore:
    """`trainer_address`: host:port of the newest start of the trainer, None while there is none; without it, this is
    the trainer's. `peer_addresses`: of everybody else who may have versions, asked when the trainer cannot help.

    `credentials`: for TLS (`channel_credentials`); `server_name`: that all their certificates are for, where it is not
    their address. `readers`: roles, as their certificates name them, that may have
    weights from here; None: whoever can connect. `max_bytes` of one version: the machine's memory by default.
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
        self._stall_seconds = stall_seconds
        self._address = ""  # of this process's server
        self._closed = threading.Event()
        self._kept = KeptVersions(keep)
        self._server = GrpcWeightServer(self._kept, readers=readers)
        most = machine_memory() if max_bytes is None else max_bytes
        self._client = GrpcWeightClient(credentials, most, server_name)

    def add_to(self, server: grpc.Server, address: str) -> None:
        """Serves what is here from the process's gRPC server. `address`: host:port where others reach that."""
        self._server.add_to(server)
        self._address = address

    @property
    def sent(self) -> Counter[tuple[str, str, int]]:
        """Bytes that left this process, by (job, role, version)."""
        return self._server.sent

    @property
    def refused(self) -> Counter[str]:
        """Requests, by reason."""
        return self._server.refused

    def close(self) -> None:
        """Whoever waits in `get` has a WeightsVersionError within a second. The server is its owner's to stop."""
        self._closed.set()
        self._server.close()

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        packed = self._kept.put((job, role, version), state_dict)
        return weights_record(job, role, version, uri=f"{_SCHEME}{role}/{version}", digest=packed.header.digest)

    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        patience = Patience(
            clock=(clock := AwakeClock()),
            deadline=clock.now() + self._fetch_seconds,
            stall_seconds=self._stall_seconds,
            closed=self._closed,
        )
        return self._version(record, patience).tensors(record)

    def _version(self, record: Weights, patience: Patience) -> Version:
        """Kept, fetched by another thread, or fetched now."""
        key = (record.job, record.role, record.version)
        if self._trainer_address is None:
            if (own := self._kept.find(key)) is None:
                raise not_kept(record, self._kept.newest(record.job, record.role))
            return own
        while True:
            version, is_mine = self._kept.expect(key)
            if is_mine:
                return self._fetch(record, version, patience, self._trainer_address)
            while not version.ended(TICK_SECONDS):
                if patience.is_over:
                    raise WeightsVersionError(record.version, 0, f"{record.uri} still arrives, in another thread")
            if version.state == "whole":
                return version

    def _fetch(
        self, record: Weights, version: Version, patience: Patience, trainer_address: Callable[[], str | None]
    ) -> Version:
        return Fetch(
            record,
            version,
            kept=self._kept,
            client=self._client,
            trainer_address=trainer_address,
            peer_addresses=self._peer_addresses,
            own_address=self._address,
            patience=patience,
        ).run()


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
