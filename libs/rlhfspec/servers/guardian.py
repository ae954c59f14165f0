"""Kills and removes what is left of a run whose supervisor died, even by a kill.

The supervisor holds the one writing end of the guardian's stdin. When it ends, however it ends, the guardian reads the
end of that file, kills every process that carries the run's mark in its environment or descends from one that does, and
removes the run's data. A supervisor that ends in order says `RELEASED` first: then nothing is left to do.

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
RELEASED = b"released\n"
# A child that is being started shows its mark a moment later only; on a busy machine, some moments later.
QUIET_SECONDS = 1.0
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


def end_run(uid: str, remove: Iterable[Path]) -> None:
    """Kills the processes of this run, this one excepted, until none has been seen for a while; then removes the paths.

    Also for who finds the connections file of a run that ended together with its guardian.
    """
    begin = quiet_since = time.monotonic()
    while time.monotonic() - quiet_since < QUIET_SECONDS and time.monotonic() - begin < GIVE_UP_SECONDS:
        if kill(processes_of(uid)):
            quiet_since = time.monotonic()
        time.sleep(_LOOK_SECONDS)
    for path in remove:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()


def kill(pids: Iterable[int]) -> int:
    """How many were there to be killed."""
    num_killed = 0
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
            num_killed += 1
    return num_killed


def processes_of(uid: str) -> set[int]:
    """Those that carry the run's mark, and all their descendants, for some programs clear the environment."""
    children: dict[int, list[int]] = {}
    marked = marked_with({f"{MARK}={uid}".encode()}, children)
    found: set[int] = set()
    while marked:
        pid = marked.pop()
        if pid not in found and pid != os.getpid():
            found.add(pid)
            marked += children.get(pid, [])
    return found


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


class Guardian:
    """The supervisor's side. Start it before anything it has to clean up after."""

    def __init__(self, run: str, *, remove: Sequence[Path] = ()) -> None:
        self._run = run
        self._remove = [str(path.absolute()) for path in remove]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Also again, after somebody killed it."""
        self._forget()
        command = [sys.executable, "-I", "-S", __file__, "--run", self._run, "--remove", *self._remove]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, start_new_session=True, cwd="/", env={**os.environ, MARK: self._run}
        )

    def release(self, timeout_seconds: float = 5.0) -> None:
        """The run is over, and all its processes with it."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(RELEASED)
            self._process.stdin.flush()
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_seconds)
        self._forget()

    def _forget(self) -> None:
        """One that is to be replaced must not take the end of its stdin for the end of the run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                with suppress(BrokenPipeError):
                    self._process.stdin.close()
            self._process = None


if __name__ == "__main__":
    main()
