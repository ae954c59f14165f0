"""Base class of servers that die with the supervisor."""

from __future__ import annotations

import asyncio
import os
import signal
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path

from rlhfspec.errors import ServerFailed
from rlhfspec.messages.servers.attached import attached
from rlhfspec.messages.servers.guardian import MARK

_SERVER_START_SECONDS = 20.0
_STOP_SECONDS = 5.0
_POLL_SERVER_SECONDS = 0.01


class ServerProgram(ABC):
    """Server process with its own folder; not safe for concurrent tasks."""

    name: str

    def __init__(self, folder: Path, *, run: str) -> None:
        self.folder = folder.absolute()
        self.log = self.folder.with_name(f"{self.folder.name}.log")  # beside the folder, so that it outlives the data
        self.url = ""  # set by start()
        self._run = run
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def start(self, deadline_seconds: float = _SERVER_START_SECONDS) -> str:
        """Start the server and return its URL once it answers; a restart keeps URL and data."""
        assert self.pid is None, f"{self.name} runs already"
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ready = False
        try:
            async with asyncio.timeout(deadline_seconds):
                # The last server's port may still be held for a moment, so retry.
                while not (ready := await self._started()):
                    await asyncio.sleep(10 * _POLL_SERVER_SECONDS)
        except TimeoutError:
            raise ServerFailed(self.name, f"not ready within {deadline_seconds:g} s: {self._last_words()}") from None
        finally:
            if not ready:
                await self._kill()
        return self.url

    async def _started(self) -> bool:
        """Start the process; return True once ready, or False if its port is in use."""
        log_size = self.log.stat().st_size if self.log.exists() else 0
        command = self._command()
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *attached(command), stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder,
                env={**os.environ, MARK: self._run}, start_new_session=True,
            )  # fmt: skip
        while self._process.returncode is None:
            if await self._ready():
                return True
            await asyncio.sleep(_POLL_SERVER_SECONDS)
        with self.log.open("rb") as log:
            log.seek(log_size)
            if b"address already in use" in log.read().lower():
                return False
        raise ServerFailed(self.name, f"ended with exit code {self._process.returncode}: {self._last_words()}")

    async def wait(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return await self._process.wait()

    async def stop(self) -> None:
        """Terminate the server, or kill it after a deadline; its data stays."""
        if self.pid is not None:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await self.wait()
            except TimeoutError:
                await self._kill()

    async def _kill(self) -> None:
        if self.pid is not None:
            self._signal(signal.SIGKILL)
            await self.wait()

    def _signal(self, which: signal.Signals) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):  # it ended meanwhile; `wait` reports that
            os.kill(self._process.pid, which)  # `send_signal` might take the exit code from `wait`

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return lines[-1].strip() if lines else f"no output in {self.log}"

    @abstractmethod
    def _command(self) -> list[str]:
        """Write the configuration, and return the command line without secrets."""

    @abstractmethod
    async def _ready(self) -> bool:
        """Return whether the server answers; set `url` if so."""


def write_secret(path: Path, content: bytes) -> None:
    """Write a file atomically, readable only by its owner."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    temporary.replace(path)
