"""Children in new interpreters: of a supervisor, and of a run."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlhfspec.messages.servers.guardian import MARK
from rlhfspec.supervisor.child import Process
from rlhfspec.worker.process import STARTED


@contextmanager
def child_of(uid: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that the guardians of a run take for one of its own."""
    command = [sys.executable, "-S", "-c", "import time; print(1, flush=True); time.sleep(120)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={MARK: uid}) as process:
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


class Interpreters:
    """Starter of any program; `Launcher` starts only this project's modules."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment

    async def start(self, name: str, arguments: Sequence[str], log: Path) -> Process:
        with log.open("ab") as output:
            return await asyncio.create_subprocess_exec(
                sys.executable, *arguments, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                env={**self.environment, STARTED: name},
                start_new_session=True,
            )  # fmt: skip

    async def begin(self) -> bool:
        return False
