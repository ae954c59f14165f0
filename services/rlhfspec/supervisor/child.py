"""Worker process across restarts. It writes its own log, so a dead supervisor never blocks it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlhfspec.messages.servers.guardian import GIVE_UP_SECONDS, MARK, has_ended, kill, marked_with, state_and_parent
from rlhfspec.worker import exits
from rlhfspec.worker.last_words import end_file, last_activity
from rlhfspec.worker.process import STARTED

_POLL_SECONDS = 0.02  # after SIGKILL, which the kernel obeys in milliseconds
_LOG_TAIL_BYTES = 1 << 20  # per read of a log, from its end


@dataclass(frozen=True, slots=True)
class Ended:
    failure: exits.Failure | None  # None: finished and left
    reason: str


class Process(Protocol):
    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int: ...


class Starter(Protocol):
    """Launcher of `python ARGUMENTS` with STARTED=name in its environment; output is appended to `log`."""

    @property
    def environment(self) -> Mapping[str, str]: ...

    async def start(self, name: str, arguments: Sequence[str], log: Path) -> Process: ...

    async def begin(self) -> bool:
        """Start the launcher's own process, if it has one; return False if that runs already."""


class Child:
    """Process of one worker. `activity`: file with its current activity."""

    def __init__(
        self,
        stage: str,
        worker: int,
        arguments: Sequence[str],
        starter: Starter,
        log: Path,
        activity: Path | None = None,
    ) -> None:
        self.stage = stage
        self.worker = worker
        self.is_abandoned = False
        self._arguments = arguments
        self._starter = starter
        self._log = log
        self._activity = activity
        self._began_at = 0  # offset in the log
        self._read_to = 0
        self._verdict = ""  # why the supervisor killed it
        self._num_killed_before = 0  # OOM kills on this machine before the start
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self) -> None:
        await self._end_family()  # processes that a dead worker left
        self._verdict = ""
        self._num_killed_before = exits.num_killed_for_memory()
        if self._activity is not None:
            for note in (self._activity, end_file(self._activity)):
                note.unlink(missing_ok=True)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._began_at = self._read_to = self._log.stat().st_size if self._log.exists() else 0
        self._process = await self._starter.start(self._name, self._arguments, self._log)

    @property
    def _name(self) -> str:
        return f"{self.stage}-{self.worker}"

    async def wait(self) -> Ended:
        assert self._process is not None, "it was started"
        code = await self._process.wait()
        await self._end_family()
        return self._ended(code)

    def ask_to_leave(self) -> None:
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGTERM)

    def abandon(self) -> None:
        """Kill the process and never restart it; callable from any thread."""
        self.is_abandoned = True
        self.kill()

    def kill(self, why: str = "") -> None:
        self._verdict = self._verdict or why
        if self.pid is not None:
            kill([self.pid])  # `Process.kill` may take the exit code from a waiting task
            self._kill_family()

    def is_held(self) -> bool:
        """Return whether the process is stopped, by SIGSTOP or in a debugger."""
        with suppress(OSError):
            return self.pid is not None and state_and_parent(self.pid)[0] in "Tt"
        return False

    def news(self) -> list[str]:
        lines = self._lines(self._read_to)
        return [str(line["message"]) for line in lines if line.get("said") or line.get("level") == "warning"]

    def _ended(self, code: int) -> Ended:
        """Return how the process ended, by its own record or else by exit status and last activity."""
        if self._verdict:
            return Ended("error", f"{self._verdict}{self._while()}")
        lines = [*self._noted_end(), *self._lines(self._began_at)]  # a log of several ranks ends with the set's
        told = next((line for line in reversed(lines) if "exit_code" in line), None)
        if told is not None and code == exits.DONE:
            return Ended(None, "left")
        if told is not None and told["exit_code"] != exits.DONE:  # a set of ranks exits with its own code
            was_killed = int(told["exit_code"]) < 0
            return Ended(
                exits.failure_of(int(told["exit_code"])), f"{told['message']}{self._while() if was_killed else ''}"
            )
        if code == exits.DONE:
            return Ended("error", f"{exits.said(code)}{self._while()}, without being asked to stop")
        unexpected = [line for line in lines if line.get("level", "error") == "error"]
        last = f": {str(unexpected[-1]['message']).strip()}" if unexpected and code > 0 else ""
        return Ended(exits.failure_of(code), f"{exits.said(code)}{self._for_memory(code)}{self._while()}{last}")

    def _for_memory(self, code: int) -> str:
        ran_out = code == -signal.SIGKILL and exits.num_killed_for_memory() > self._num_killed_before
        return " as memory ran out" if ran_out else ""

    def _noted_end(self) -> list[dict[str, Any]]:
        if self._activity is None or not end_file(self._activity).exists():
            return []
        return [_parsed(end_file(self._activity).read_bytes())]

    def _while(self) -> str:
        what = last_activity(self._activity) if self._activity is not None else ""
        return f" while {what}" if what else ""

    def _lines(self, start: int) -> list[dict[str, Any]]:
        """Return complete log lines from byte `start` on. Lines in other formats count as messages."""
        with suppress(OSError), self._log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(start, size - _LOG_TAIL_BYTES))
            data = log.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read_to = log.tell() - len(data) + len(whole)
            return [_parsed(line) for line in whole.splitlines() if line.strip()]
        return []

    def _kill_family(self) -> list[int]:
        marks = {f"{STARTED}={self._name}".encode(), f"{MARK}={self._starter.environment[MARK]}".encode()}
        family = [pid for pid in marked_with(marks) if pid != os.getpid()]
        kill(family)
        return family

    async def _end_family(self) -> None:
        """Kill the processes that the worker left, and wait until they hold no memory, device or port."""
        family = self._kill_family()
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_UP_SECONDS):
                while not all(map(has_ended, family)):
                    await asyncio.sleep(_POLL_SECONDS)


def _parsed(line: bytes) -> dict[str, Any]:
    text = line.decode(errors="replace")
    with suppress(ValueError):
        if isinstance(parsed := json.loads(text), dict) and "message" in parsed:
            return parsed
    return {"message": text}
