"""Proxy of KV transfers that cuts, slows, breaks or corrupts them; `sitecustomize` routes through it."""

import os
import random
import socket
import time
from contextlib import suppress
from pathlib import Path

from faults.proxy import Proxy

SLOW_BYTES_A_SECOND = 30_000.0


class LinkProxy(Proxy):
    def __init__(self) -> None:
        super().__init__("", 0)
        self.bytes_a_second = float("inf")
        self.corrupts = False
        self.num_connections = 0
        self.num_corrupted = 0  # pieces

    @property
    def environment(self) -> dict[str, str]:
        folder = str(Path(__file__).with_name("led"))
        path = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))
        return {"PYTHONPATH": path, "FAULTS_LINK_PORT": str(self.port)}

    def break_off(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _reach(self, near: socket.socket) -> socket.socket:
        near.settimeout(5.0)
        line = b""
        while not line.endswith(b"\n"):
            line += near.recv(1)
        near.settimeout(None)
        host, port = line.decode().split()
        self.num_connections += 1
        return socket.create_connection((host, int(port)))

    def _passed(self, piece: bytes) -> bytes:
        time.sleep(min(len(piece) / self.bytes_a_second, 5.0))
        if not self.corrupts:
            return piece
        self.num_corrupted += 1
        changed = bytearray(piece)
        changed[random.randrange(len(piece))] ^= 1 << random.randrange(8)
        return bytes(changed)
