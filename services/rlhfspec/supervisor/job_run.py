"""Base class of a job's run, in one process (`rlhfspec.cli.local`) or many (`rlhfspec.supervisor.run`)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhfspec.job import RLHFJob
from rlhfspec.runs.folder.manifest import RunOutcome
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.view.summary import finish_folder
from rlhfspec.runs.view.view import View

Say = Callable[[str], None]
Models = dict[str, dict[str, Any]]  # load report by role


class JobRun(ABC):
    """Run of a job in an open folder. Call `build`, `begin`, `stages`, `finish`, `close`, in this order."""

    def __init__(self, job: RLHFJob, base_folder: Path, folder: RunFolder, view: View) -> None:
        self.folder = folder
        self.serve_port: int | None = None  # for clients of the policy; None: there is no server
        self.stop = asyncio.Event()
        self.runner = asyncio.Runner()
        self._job = job
        self._base_folder = base_folder
        self._view = view
        self._say: Say = view.say
        self._leaving = ExitStack()

    def say(self, text: str) -> None:
        self._say(text)

    @abstractmethod
    def build(self, say: Say) -> None:
        """Load data, rewards and models. After InvalidRequest nothing is left behind."""

    @abstractmethod
    def begin(self) -> None:
        """Record the loaded models and data in the run folder."""

    @abstractmethod
    async def stages(self) -> None:
        """Run until the last step or `stop`; raise the StageError that ended the run."""

    @property
    @abstractmethod
    def is_unfinished(self) -> bool: ...

    def finish(self, outcome: RunOutcome, reason: str, *, resume_command: str, console: Console) -> None:
        finish_folder(self.folder, self._job, outcome, reason, resume_command=resume_command).print(console)

    def abandon(self) -> None:  # noqa: B027 (what runs in this process ends with it)
        """Kill everything that `build` started."""

    def close(self) -> None:
        self._leaving.close()
        self.runner.close()
