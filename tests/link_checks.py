"""What tests of links share: other processes, and what must not be left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = """
import sys
from rlhfspec.migration.links.opening import open_sending
sending = open_sending(sys.stdin.readline().strip(), seconds=10)
print("ready", flush=True)
for line in sys.stdin:
    key, num_bytes, seed = line.split()
    room = sending.room(int(num_bytes))
    for start in range(0, len(room), 251):
        room[start:start + 251] = bytes((7 * i + int(seed)) % 251 for i in range(min(251, len(room) - start)))
    sending.send(key, len(room))
    print("sent", key, flush=True)
sending.close()
"""

DESTINATION = """
import sys
from rlhfspec.migration.links.opening import make_landing
landing = make_landing(sys.argv[1])
print(landing.offer, flush=True)
for line in sys.stdin:
    key, num_bytes = line.split()
    print(sum(landing.take(key, int(num_bytes), timeout=30)), flush=True)
    landing.done(key)
landing.close()
"""


def pattern(num_bytes: int, seed: int = 0) -> bytes:
    """No two neighbouring seeds look alike."""
    piece = bytes((7 * i + seed) % 251 for i in range(251))
    return (piece * (num_bytes // 251 + 1))[:num_bytes]


class Other:
    """Another process, spoken to line by line; killed at the end."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@contextmanager
def other(code: str, *arguments: str) -> Iterator[Other]:
    process = Other(code, *arguments)
    try:
        yield process
    finally:
        process.kill()


@contextmanager
def nothing_left() -> Iterator[None]:
    """No file, socket, thread, or memory of a link more than before."""
    before = _held()
    yield
    assert _held() == before


def _held() -> tuple[object, ...]:
    maps = Path("/proc/self/maps").read_text().count("rlhfspec-link")
    files = [
        os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{fd}").exists()
    ]
    num_sockets = sum(each.startswith(("socket:", "/memfd:")) for each in files)
    return num_sockets, len(files), threading.active_count(), maps, sorted(os.listdir("/dev/shm"))
