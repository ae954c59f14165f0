"""Guardian processes that clean up after a run whose supervisor died, even by SIGKILL.

The supervisor holds the only writing end of a guardian's stdin. If stdin ends without `RELEASED`, the guardian kills
every process with the run's mark in its environment, and its descendants, and removes the run's data. There are two,
as one may die with the supervisor. This script imports only the standard library.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

MARK = "RLHFSPEC_RUN"  # environment variable with the run's uid in all its processes
GUARDS = "RLHFSPEC_GUARDS"  # the same in guardians
UID = "uid"  # file in RUN/processes with the uid of the run that made it
RELEASED = b"released\n"
# A process just forked shows its mark with a delay, longer on a busy machine.
_QUIET_SECONDS = 1.0
NOTHING_STARTS = 0.1  # replaces _QUIET_SECONDS if no process is left that could start others
NUM_GUARDIANS = 2
GIVE_UP_SECONDS = 30.0  # a process that survives SIGKILL hangs in the kernel
_POLL_PROCESSES_SECONDS = 0.02


def main() -> None:
    parser = ArgumentParser(description="Wait for the end of stdin, then kill a run's processes and remove its files.")
    parser.add_argument("--run", required=True, help="its uid")
    parser.add_argument("--remove", nargs="*", default=[], type=Path, help="files and folders")
    arguments = parser.parse_args()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # meant for the supervisor
    said = b""
    while part := os.read(0, 1024):
        said += part
    if said != RELEASED:
        end_run(arguments.run, arguments.remove)


def end_run(uid: str, remove: Iterable[Path], quiet_seconds: float = _QUIET_SECONDS) -> None:
    """Kill the run's processes until none appears for `quiet_seconds`, then remove those paths that it still owns."""
    now = begin = quiet_since = time.monotonic()
    while now - quiet_since < quiet_seconds and now - begin < GIVE_UP_SECONDS:
        if kill(processes_of(uid)):
            quiet_since = time.monotonic()
        time.sleep(_POLL_PROCESSES_SECONDS)
        now = time.monotonic()
    for path in remove:
        if _is_anothers(path, uid):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def _is_anothers(path: Path, uid: str) -> bool:
    with suppress(OSError):
        return (path / UID).read_text() != uid
    return False


def kill(pids: Iterable[int]) -> int:
    """Kill the processes and return how many existed."""
    num_killed = 0
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            num_killed += 1
    return num_killed


def processes_of(uid: str) -> set[int]:
    """Return the ids of the run's marked processes and their descendants (perhaps unmarked), without guardians."""
    children: dict[int, list[int]] = {}
    marked = marked_with({f"{MARK}={uid}".encode()}, children)
    spared = {os.getpid(), *guardians_of(uid)}
    found: set[int] = set()
    while marked:
        pid = marked.pop()
        if pid not in found | spared:
            found.add(pid)
            marked += children.get(pid, [])
    return found


def guardians_of(uid: str) -> list[int]:
    return marked_with({f"{GUARDS}={uid}".encode()})


def marked_with(marks: set[bytes], children: dict[int, list[int]] | None = None) -> list[int]:
    """Return the ids of processes with all marks in their environment; fill `children` (child ids by parent id)."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            state, parent = state_and_parent(pid)
            if state == "Z":  # zombie
                continue
            if children is not None:
                children.setdefault(parent, []).append(pid)
            if marks <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                found.append(pid)
    return found


def state_and_parent(pid: int) -> tuple[str, int]:
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return state, int(parent)


def has_ended(pid: int) -> bool:
    """Return whether the process is gone or a zombie."""
    try:
        return state_and_parent(pid)[0] in "ZX"
    except OSError:
        return True


class Guardians:
    """Guardian processes of one supervisor, which starts and releases them."""

    def __init__(self, run: str, *, remove: Sequence[Path] = ()) -> None:
        self._run = run
        self._remove = [str(path.absolute()) for path in remove]
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.poll() is None]

    def start(self) -> bool:
        """Start missing guardians and return whether any was missing."""
        alive = self.pids
        for process in self._processes:
            if process.pid not in alive:
                _close(process)
        self._processes = [process for process in self._processes if process.pid in alive]
        command = [sys.executable, "-I", "-S", __file__, "--run", self._run, "--remove", *self._remove]
        environment = {**os.environ, MARK: self._run, GUARDS: self._run}
        while len(self._processes) < NUM_GUARDIANS:
            self._processes.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True, cwd="/", env=environment)
            )
        return len(alive) < NUM_GUARDIANS

    def release(self, timeout_seconds: float = 5.0) -> None:
        """End the guardians without a cleanup."""
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(RELEASED)
                process.stdin.flush()
            _close(process)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout_seconds)
            process.kill()
            process.wait()
        self._processes = []


def _close(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()


if __name__ == "__main__":
    main()
