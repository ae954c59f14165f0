"""A starter of children that runs each program in a new interpreter."""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhfspec.supervisor.child import Process
from rlhfspec.worker.process import STARTED


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
