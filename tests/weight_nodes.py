"""Stores of several nodes, each with its server, in one process."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import torch

from rlhfspec.messages.records import Role, Weights
from rlhfspec.training.weights.base import StateDict
from rlhfspec.training.weights.grpc import GrpcWeightStore

LOOPBACK = "127.0.0.1"


class Node:
    def __init__(self, *, server_credentials: grpc.ServerCredentials | None = None, **settings: Any) -> None:
        self.store = GrpcWeightStore(**{"keep": 2, "fetch_seconds": 20.0} | settings)
        self.pool = ThreadPoolExecutor(8)
        self.server = grpc.server(self.pool, options=[("grpc.so_reuseport", 0)])
        bind = f"{LOOPBACK}:0"
        if server_credentials is None:
            port = self.server.add_insecure_port(bind)
        else:
            port = self.server.add_secure_port(bind, server_credentials)
        self.address = f"{LOOPBACK}:{port}"
        self.store.add_to(self.server)
        self.server.start()

    def close(self) -> None:
        self.store.close()
        self.server.stop(None).wait()
        self.pool.shutdown()


class Cluster:
    def __init__(self, leaving: ExitStack, **settings: Any) -> None:
        self._leaving = leaving
        self._settings = settings
        self.trainer = self.node()

    def node(self, **settings: Any) -> Node:
        node = Node(**self._settings | settings)
        self._leaving.callback(node.close)
        return node

    def receiver(self, **settings: Any) -> Node:
        return self.node(trainer_address=lambda: self.trainer.address, **settings)


@contextmanager
def cluster(**settings: Any) -> Iterator[Cluster]:
    with ExitStack() as leaving:
        yield Cluster(leaving, **settings)


class FromTheTrainer:
    """WeightStore that puts as the trainer and gets as a receiver."""

    def __init__(self, cluster: Cluster, keep: int) -> None:
        self._trainer = cluster.node(keep=keep)
        self._receiver = cluster.node(keep=keep, trainer_address=lambda: self._trainer.address)

    def put(self, job: str, role: Role, version: int, state_dict: StateDict) -> Weights:
        return self._trainer.store.put(job, role, version, state_dict)

    def get(self, record: Weights) -> dict[str, torch.Tensor]:
        return self._receiver.store.get(record)
