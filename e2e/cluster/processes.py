"""Processes of a cluster: started with a log each, recorded so that anybody can end them, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path


class StartFailed(RuntimeError):
    """Something of the cluster did not come up; the message ends with the last lines of its log."""


class Processes:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """In a session of its own, so that Ctrl-C at the test does not end it half way."""
        (self.folder / "pids").mkdir(parents=True, exist_ok=True)
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                [str(each) for each in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | dict(environment or {}),
                start_new_session=True,
            )
        (self.folder / "pids" / name).write_text(f"{process.pid} {started_at(process.pid)}")
        self._started[name] = process
        return process

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def wait_for(self, name: str, ready: Callable[[], bool], *, seconds: float = 60) -> None:
        """Until `ready`; fails at once when the process ends, and says what it wrote last."""
        end = time.monotonic() + seconds
        while not ready():
            code = self._started[name].poll()
            if code is not None or time.monotonic() > end:
                what = f"ended with {code}" if code is not None else f"is not ready after {seconds} s"
                raise StartFailed(f"{name} {what}:\n{last_lines(self.log(name))}")
            time.sleep(0.05)

    def kill(self, name: str) -> None:
        process = self._started.pop(name)
        process.kill()
        process.wait()
        (self.folder / "pids" / name).unlink(missing_ok=True)

    def number_of(self, name: str) -> int:
        return self._started[name].pid

    def signal(self, name: str, number: signal.Signals) -> None:
        self._started[name].send_signal(number)

    def reap(self) -> None:
        """Collects those that somebody else has killed."""
        for process in self._started.values():
            process.wait(timeout=30)


def kill_recorded(folder: Path) -> None:
    """Kills what `Processes` of this folder started, whoever did; a number that now is another process's is left."""
    killed = []
    for record in (folder / "pids").glob("*"):
        number, start = (int(part) for part in record.read_text().split())
        if start and started_at(number) == start:
            # the first process of a node's namespace ends last, after everything in it
            killed += [(each, started_at(each)) for each in (number, *_children(number))]
            os.kill(number, signal.SIGKILL)
    end = time.monotonic() + 20
    while any(started_at(number) == start and not _is_zombie(number) for number, start in killed):
        if time.monotonic() > end:
            raise TimeoutError(f"processes {[number for number, _ in killed]} of {folder} do not die")
        time.sleep(0.01)


def started_at(number: int) -> int:
    """In clock ticks since boot; 0 when there is no such process. With the number, it names a process for good."""
    return int(_stat(number)[19]) if _stat(number) else 0


def _children(number: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{number}/task/{number}/children").read_text().split()]


def _is_zombie(number: int) -> bool:
    return _stat(number)[:1] == ["Z"]


def _stat(number: int) -> list[str]:
    """Fields from the state on: the name before it may hold spaces and parentheses."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def last_lines(log: Path, num: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-num:]) if log.exists() else "(no log)"
