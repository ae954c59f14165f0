"""Helpers of link tests: other processes, and checks for leaks."""

import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhfspec.moves.migration.links import nixl
from rlhfspec.moves.migration.links.opening import make_landing, open_sending

NO_NIXL = pytest.mark.skipif(nixl._package() is None, reason="the package nixl is not installed")
NIXL = [pytest.param("nixl", marks=NO_NIXL)]

SOURCE = """
import sys
from rlhfspec.moves.migration.links.opening import open_sending
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
from rlhfspec.moves.migration.links.opening import make_landing
landing = make_landing(sys.argv[1])
print(landing.offer, flush=True)
for line in sys.stdin:
    key, num_bytes = line.split()
    print(sum(landing.take(key, int(num_bytes), timeout=30)), flush=True)
    landing.done(key)
landing.close()
"""


class Other:
    """Another process, controlled line by line and killed at the end."""

    def __init__(self, code: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()


@contextmanager
def other(code: str, *arguments: str) -> Iterator[Other]:
    process = Other(code, *arguments)
    try:
        yield process
    finally:
        process.kill()


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = _held()
    yield
    patience = time.monotonic() + 60  # the kernel's list of threads is a moment behind the join
    while (more := _held() - before) and time.monotonic() < patience:
        time.sleep(0.01)
    assert not more, more


def _held() -> Counter[str]:
    """Count resources. Only increases matter, as those of an earlier test may end meanwhile."""
    numbers = {"files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
    numbers |= {"tasks": len(os.listdir("/proc/self/task"))}
    numbers |= {"maps": Path("/proc/self/maps").read_text().count("rlhfspec-link")}
    return Counter(numbers) + Counter(shared_names())


@pytest.fixture(scope="module")
def warm() -> None:
    landing = make_landing("torch")
    sending = open_sending(landing.offer)
    sending.room(1)
    sending.send("m/0", 1)
    landing.take("m/0", 1, timeout=30)
    sending.close()
    landing.close()


def shared_names() -> list[str]:
    return [name for name in sorted(os.listdir("/dev/shm")) if name.startswith(("rlhfspec-link", "ucx", "torch"))]
