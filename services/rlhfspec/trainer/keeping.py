"""Run folder without a supervisor: the trainer locks it, records loaded models and finishes it."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any

from rlhfspec.errors import StageFailed, StorageError
from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import WorkerInfo
from rlhfspec.runs.folder.manifest import RunOutcome
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.view.summary import finish_folder, kept_traceback
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import StageBus
from rlhfspec.stage.vitals import Vitals
from rlhfspec.trainer.service import TrainerService
from rlhfspec.worker import exits
from rlhfspec.worker.last_words import one_line
from rlhfspec.worker.mirror import Mirror

log = logging.getLogger("rlhfspec.stage")


class LoadedModels(Service):
    """Service that writes the loaded models into the manifest."""

    def __init__(self, bus: StageBus, folder: RunFolder) -> None:
        super().__init__("folder", 0, Vitals())  # reported nowhere
        self._bus = bus
        self._folder = folder

    async def run(self) -> None:
        models: dict[str, Any] = {}
        async with await self._bus.subscribe(WorkerInfo) as infos:
            while not self.stopping.is_set():
                pulling = infos.pull(max_records=64, timeout_seconds=PULL_SECONDS)
                before = dict(models)
                for delivery in await self.unless_stopped(pulling):
                    models |= {role: asdict(report) for role, report in delivery.record.models.items()}
                if models != before:
                    await self.in_thread(self._folder.loaded, dict(models))


class KeptFolder:
    """Run folder locked until the trainer's process ends."""

    def __init__(self, job: RLHFJob, folder: RunFolder, bus: StageBus, mirror: Mirror | None = None) -> None:
        self._job = job
        self._folder = folder
        self._bus = bus
        self._mirror = mirror
        self._trainer: TrainerService | None = None
        folder.hold()

    def watch(self, trainer: TrainerService) -> None:
        self._trainer = trainer
        trainer.beside.append(LoadedModels(self._bus, self._folder))

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Finish the folder unless the error is temporary."""
        try:
            if error is None:
                self._finish(*self._ended())
            elif exits.code_of(cause := _cause(error)) != exits.TEMPORARY:
                with suppress(StorageError, OSError):
                    self._finish("failed", f"{_said(cause)}; {kept_traceback(self._folder, error)}")
        finally:
            self._folder.close()

    def _ended(self) -> tuple[RunOutcome, str]:
        trainer = self._trainer
        if trainer is None or not trainer.is_done:
            return "stopped", "the trainer was asked to stop"
        return "completed", str(trainer.ended_early or "")

    def _finish(self, outcome: RunOutcome, reason: str) -> None:
        again = f"kubectl rlhf resume {self._job.metadata.name}"
        finish_folder(self._folder, self._job, outcome, reason, resume_command=again)
        if self._mirror is not None:
            self._mirror.send()


def _cause(error: BaseException) -> BaseException:
    return error.__cause__ if isinstance(error, StageFailed) and error.__cause__ is not None else error


def _said(error: BaseException) -> str:
    return f"trainer 0 failed: {one_line(error) if isinstance(error, Exception) else type(error).__name__}"
