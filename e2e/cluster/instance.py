"""What belongs to one cluster: its names, addresses and folders, all made from one number."""

from __future__ import annotations

import fcntl
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO

INSTANCES = 10


@dataclass(frozen=True)
class Instance:
    """
    >>> one = Instance(3)
    >>> one.node_address(2), one.pod_subnet(2), one.dns_address, one.bridge
    ('10.83.0.2', '10.83.66.0/24', '10.83.128.10', 'rlhf3')
    """

    number: int

    @property
    def folder(self) -> Path:
        """Short: the paths of Unix sockets have at most 107 characters."""
        return scratch() / str(self.number)

    @property
    def bridge(self) -> str:
        return f"rlhf{self.number}"

    @property
    def _net(self) -> str:
        return f"10.{80 + self.number}"

    @property
    def host_address(self) -> str:
        """Where the API server listens when there are nodes: the bridge's own address."""
        return f"{self._net}.0.254"

    def node_address(self, node: int) -> str:
        return f"{self._net}.0.{node}"

    def pod_subnet(self, node: int) -> str:
        return f"{self._net}.{64 + node}.0/24"

    @property
    def pod_subnets(self) -> str:
        return f"{self._net}.64.0/18"

    @property
    def services(self) -> str:
        return f"{self._net}.128.0/24"

    @property
    def api_service_address(self) -> str:
        return f"{self._net}.128.1"

    @property
    def dns_address(self) -> str:
        return f"{self._net}.128.10"

    def namespace(self, node: int) -> str:
        """Of the network of a node."""
        return f"{self.bridge}n{node}"

    def link(self, node: int) -> str:
        """The host's end of a node's cable."""
        return f"{self.bridge}v{node}"

    def cgroup(self, node: int) -> str:
        return f"{self.bridge}-node{node}"


def scratch() -> Path:
    return Path(os.environ.get("RLHFSPEC_E2E_SCRATCH", "/tmp/rlhfspec-e2e"))


def claim(number: int | None) -> tuple[Instance, IO[bytes]]:
    """An instance nobody else uses, and the lock that says so for as long as it is open."""
    scratch().mkdir(parents=True, exist_ok=True)
    for each in [number] if number is not None else range(INSTANCES):
        lock = (scratch() / f"{each}.lock").open("ab")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        return Instance(each), lock
    raise RuntimeError(f"cluster instance {'0 to 9' if number is None else number}: in use by another process")


def free_ports(num: int) -> list[int]:
    """Free now; taken by nobody but us unless somebody asks the system for a port in between."""
    sockets = [socket.socket() for _ in range(num)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
