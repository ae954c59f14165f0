"""A trainer's sender and generators' receivers of a weight group in one process."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import torch
from torch import Tensor

from rlhfspec.messages.records import Weights
from rlhfspec.training.modeling.digest import digest
from rlhfspec.training.weights.base import weights_record
from rlhfspec.training.weights.group.messages import Wish
from rlhfspec.training.weights.group.receiver import GroupReceiver
from rlhfspec.training.weights.group.sender import ONE_RANK, GroupSender, SendingRanks
from rlhfspec.training.weights.group.ways import Ways

LOOPBACK = "127.0.0.1"


def weights(version: int, *, num_layers: int = 8, num_bytes: int = 1 << 20) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(version)
    size = num_bytes // num_layers // 4 // 64
    return {f"layers.{layer}": torch.randn(size, 64, generator=draw) for layer in range(num_layers)}


def record_of(version: int, state: dict[str, Tensor]) -> Weights:
    return weights_record("sums", "policy", version, uri=f"grpc:policy/{version}", digest=digest(state))


class GroupTrainer:
    def __init__(self, **settings: Any) -> None:
        self.sender = GroupSender("sums", host=LOOPBACK, **settings)
        self.server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        self.address = f"{LOOPBACK}:{self.server.add_insecure_port(f'{LOOPBACK}:0')}"
        self.sender.add_to(self.server)
        self.server.start()

    def close(self) -> None:
        self.sender.close()
        self.server.stop(None).wait()


class GroupNode:
    """A generator's receiver, which reserves an address as a server does."""

    def __init__(self, trainer: Callable[[], str | None], *, dtype: Any = "") -> None:
        self.trainer = trainer
        self._listening = socket.create_server((LOOPBACK, 0))
        self.address = f"{LOOPBACK}:{self._listening.getsockname()[1]}"
        self.receiver = GroupReceiver(
            Wish(wants=True, dtype=dtype), Ways("group"), address=self.address, trainer_address=lambda: self.trainer()
        )

    def has(self, version: int, state: dict[str, Tensor]) -> bool:
        """Return whether the version is here with every bit; fail if only some are."""
        found = self.receiver.take(record_of(version, state))
        assert found is None or digest(found) == digest(state)
        return found is not None

    def close(self) -> None:
        self.receiver.close()
        self._listening.close()


class GroupOfNodes:
    def __init__(self, leaving: ExitStack, num_nodes: int, **settings: Any) -> None:
        self.trainer = GroupTrainer(bucket_bytes=1 << 16)
        leaving.callback(self.trainer.close)
        self.sender = self.trainer.sender
        self._leaving, self._settings = leaving, settings
        self.nodes = [self.joined() for _ in range(num_nodes)]
        self.until_members(num_nodes)

    def joined(self) -> GroupNode:
        node = GroupNode(lambda: self.trainer.address, **self._settings)
        self._leaving.callback(node.close)
        return node

    def until_members(self, count: int) -> None:
        eventually(lambda: len(self.sender.members) == count)

    def sent(self, version: int, state: dict[str, Tensor], ranks: SendingRanks = ONE_RANK) -> str:
        """Send a version and return the error."""
        sending = self.sender.begin("policy", version, state, ranks)
        assert sending is not None, "nobody wants it"
        return sending.end(digest(state))


@contextmanager
def group_of(num_nodes: int, **settings: Any) -> Iterator[GroupOfNodes]:
    with ExitStack() as leaving:
        yield GroupOfNodes(leaving, num_nodes, **settings)


def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "never"
        time.sleep(0.01)
