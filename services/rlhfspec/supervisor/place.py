from __future__ import annotations

import secrets
from contextlib import ExitStack
from pathlib import Path

from rlhfspec.messages.servers.guardian import NOTHING_STARTS, Guardians, end_run
from rlhfspec.messages.servers.room import SERVERS_BYTES, refuse_full_disk
from rlhfspec.messages.servers.scratch import Scratch
from rlhfspec.runs.folder.run_folder import RunFolder


class ProcessPlace:
    """Files of one start of a run, with guardians that remove them if the supervisor dies."""

    def __init__(self, folder: RunFolder) -> None:
        self.uid = secrets.token_hex(4)
        self.folder = folder.path.absolute()
        self.logs = folder.logs.absolute()
        self.path = folder.processes.absolute()
        self.credentials = self.path / "credentials"
        self.connections_file = self.path / "connections.json"
        self.job_file = self.path / "job.json"
        self._scratch = Scratch(self.uid, self.path)
        removed = [self.path, self._scratch.beginning, *self._scratch.paths]
        self.guardians = Guardians(self.uid, remove=removed)

    @property
    def memory(self) -> Path:
        return self._scratch.path

    @property
    def activity(self) -> Path:
        return self.memory / "activity"

    def make(self) -> None:
        refuse_full_disk(self.folder, SERVERS_BYTES, "the run's servers")
        self.guardians.start()
        self._scratch.make()

    def remove(self) -> None:
        """End the run's processes, remove its files and release the guardians, despite errors."""
        with ExitStack() as leaving:
            leaving.callback(self.guardians.release)
            leaving.callback(self._scratch.remove)
            leaving.callback(end_run, self.uid, [self.path], quiet_seconds=NOTHING_STARTS)
