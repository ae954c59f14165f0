"""Processes of a run, found by their environment."""

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from rlhfspec.messages.servers.guardian import MARK
from rlhfspec.worker.process import STARTED as WORKER_MARK


def of_run(uid: str) -> list[int]:
    return [pid for pid in _pids() if environment_of(pid).get(MARK) == uid]


def named(uid: str, name: str) -> list[int]:
    """Return the pids of a worker, server, launcher or guardian, first rank first."""
    found = [pid for pid in of_run(uid) if _mark(pid) == name or _is(pid, name)]
    return sorted(found, key=lambda pid: int(environment_of(pid).get("RANK", "0")))


def is_alive(pid: int) -> bool:
    """Return whether the process runs. An unreaped zombie counts as dead."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def send(pid: int, number: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


@contextmanager
def slowed(*pids: int, stopped_seconds: float = 0.05, running_seconds: float = 0.01) -> Iterator[None]:
    """Run the processes only part of the time, so that a fast machine does not end what a test waits for."""
    done = threading.Event()

    def stop_and_go() -> None:
        while not done.wait(running_seconds):
            for pid in pids:
                send(pid, signal.SIGSTOP)
            done.wait(stopped_seconds)
            for pid in pids:
                send(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def is_listening(url: str) -> bool:
    parts = urlsplit(url)
    try:
        socket.create_connection((parts.hostname, parts.port or 0), timeout=1.0).close()
    except OSError:
        return False
    return True


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the addresses and ports of TCP that the process listens on."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in _read(pid, f"net/{table}").splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                address, _, port = local.partition(":")
                family = socket.AF_INET if len(address) == 8 else socket.AF_INET6
                found.append((socket.inet_ntop(family, bytes.fromhex(address)[::-1]), int(port, 16)))
    return found


def _mark(pid: int) -> str:
    return environment_of(pid).get(WORKER_MARK, "").rstrip(".")  # a launcher leaves room in its own for longer names


def _is(pid: int, name: str) -> bool:
    words = {"nats": "nats-server", "redis": "valkey-server", "guardian": "guardian.py"}
    return name in words and words[name] in _read(pid, "cmdline").replace("\0", " ")


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def environment_of(pid: int) -> dict[str, str]:
    pairs = (line.partition("=") for line in _read(pid, "environ").split("\0"))
    return {name: value for name, _, value in pairs}


def _read(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().decode(errors="replace")
    except OSError:
        return ""
