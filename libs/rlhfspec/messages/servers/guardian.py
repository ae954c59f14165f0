"""Kills and removes what is left of a run whose supervisor died, even by a kill.

The supervisor holds the one writing end of a guardian's stdin. When it ends, however it ends, the guardian reads the
end of that file, kills every process that carries the run's mark in its environment or descends from one that does, and
removes the run's data. A supervisor that ends in order says `RELEASED` first: then nothing is left to do.

A run has two guardians, so that one is left when the other dies together with the supervisor.

Imports the standard library only, and is started as a script, so that it is there before the first server.
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

MARK = "RLHFSPEC_RUN"  # names the run in the environment of all its processes
GUARDS = "RLHFSPEC_GUARDS"  # names it in a guardian's, too
UID = "uid"  # the file in a run's folder that says whose it is
RELEASED = b"released\n"
# A child that is being started shows its mark a moment later only; on a busy machine, some moments later.
_QUIET_SECONDS = 1.0
NOTHING_STARTS = 0.1  # so long to look, in place of that, where no process is left that could start one
NUM_GUARDIANS = 2
GIVE_UP_SECONDS = 30.0  # a process that even a kill does not end hangs in the kernel
_LOOK_SECONDS = 0.02


def main() -> None:
    parser = ArgumentParser(description="Waits for the end of stdin, then ends what is left of a run.")
    parser.add_argument("--run", required=True, help="its uid")
    parser.add_argument("--remove", nargs="*", default=[], type=Path, help="files and folders")
    arguments = parser.parse_args()
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # meant for the supervisor, whose end we wait for
    said = b""
    while part := os.read(0, 1024):
        said += part
    if said != RELEASED:
        end_run(arguments.run, arguments.remove)


def end_run(uid: str, remove: Iterable[Path], quiet_seconds: float = _QUIET_SECONDS) -> None:
    """Kill the processes of this run, guardians excepted, until none has been seen for a while. Then remove the paths,
    but for a folder that another run made since."""
    now = begin = quiet_since = time.monotonic()
    while now - quiet_since < quiet_seconds and now - begin < GIVE_UP_SECONDS:
        if kill(processes_of(uid)):
            quiet_since = time.monotonic()
        time.sleep(_LOOK_SECONDS)
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
    """How many were there to be killed."""
    num_killed = 0
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            num_killed += 1
    return num_killed


def processes_of(uid: str) -> set[int]:
    """Those that carry the run's mark, and all their descendants, for some programs clear the environment. Neither
    this process nor a guardian."""
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
    """The processes that have all of these in their environment. `children`: is filled, by parent, with all."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            state, parent = state_and_parent(pid)
            if state == "Z":  # dead, and not yet noticed by its parent
                continue
            if children is not None:
                children.setdefault(parent, []).append(pid)
            if marks <= set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")):
                found.append(pid)
    return found


def state_and_parent(pid: int) -> tuple[str, int]:
    """The name before them is in brackets, and may hold spaces and brackets itself."""
    state, parent, *_ = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return state, int(parent)


class Guardians:
    """The supervisor's side. Start them before anything they have to clean up after."""

    def __init__(self, run: str, *, remove: Sequence[Path] = ()) -> None:
        self._run = run
        self._remove = [str(path.absolute()) for path in remove]
        self._processes: list[subprocess.Popen[bytes]] = []

    @property
    def pids(self) -> list[int]:
        """Of those that are alive."""
        return [process.pid for process in self._processes if process.poll() is None]

    def start(self) -> bool:
        """Also again, after somebody killed one. False: all were there."""
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
        """The run is over, and all its processes with it."""
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
    """What a dead one was not told any more is not told now."""
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()


if __name__ == "__main__":
    main()
