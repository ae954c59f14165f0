"""`rlhfspec run`: every stage of a job in one process, over the memory transport.

Each stage is made by its own builder, from the job and its context alone, and whatever is wrong with the job is said
then; only then the stages start. The run folder is there before the first step and is finished however the run ends.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from rich.console import Console

from rlhfspec.awake_clock import AwakeClock
from rlhfspec.cli.watch import WatchService
from rlhfspec.job import RLHFJob
from rlhfspec.loop import workers_of
from rlhfspec.prompts.service import PromptsService
from rlhfspec.reward.service import RewardService
from rlhfspec.service.base import Service
from rlhfspec.service.bus import Bus
from rlhfspec.service.context import Context, Run
from rlhfspec.service.dead_letters import DeadLetterWatch
from rlhfspec.service.heartbeats import Heartbeats
from rlhfspec.service.supervisor import Supervisor
from rlhfspec.service.vitals import Vitals
from rlhfspec.telemetry.manifest import RunOutcome
from rlhfspec.telemetry.plots import overview
from rlhfspec.telemetry.run_folder import RunFolder
from rlhfspec.telemetry.summary import summarize
from rlhfspec.telemetry.view import View
from rlhfspec.trainer.service import TrainerService
from rlhfspec.transport.memory import MemoryTransport
from rlhfspec.weights import MemoryWeightStore

Say = Callable[[str], None]
MOST_PENDING = 1 << 20  # messages of a subject: several steps of any job that one process can run
STALL_SECONDS = 300.0  # so long everybody may wait for somebody
GRACE_SECONDS = 120.0  # for the trainer to end its step and write a checkpoint
KEPT_VERSIONS = 2  # beyond what staleness needs


class LocalRun:
    """One run of a job in one folder: `build`, `begin`, `stages`, `finish`. `job` has its `tiny:` names resolved."""

    def __init__(self, job: RLHFJob, base_folder: Path, folder: RunFolder, view: View) -> None:
        self.folder = folder
        self.stop = asyncio.Event()
        self.say: Say = view.say
        self._job = job
        self._view = view
        self._run = Run(uid=secrets.token_hex(4), base_folder=base_folder, folder=folder.path)
        self._vitals = Vitals(AwakeClock())
        self._transport = MemoryTransport(clock=self._vitals.clock, max_pending=MOST_PENDING)
        workers = workers_of(job) | {"view": 1}
        self._bus = Bus(
            self._transport, job.metadata.name, uid=self._run.uid, workers=workers, clock=self._vitals.clock
        )
        self._weights = MemoryWeightStore(keep=KEPT_VERSIONS + job.spec.training.max_staleness)
        self._services: list[Service] = []
        self._leaving = ExitStack()

    def build(self, say: Say) -> None:
        """Loads data, rewards and models. Raises InvalidRequest naming the field to fix."""
        for stage, num_workers in workers_of(self._job).items():
            make = import_module(f"rlhfspec.{stage}.build").build
            for worker in range(num_workers):
                context = Context(
                    worker=worker,
                    bus=self._bus.of(stage, worker),
                    weights=self._weights,
                    vitals=self._vitals,
                    run=self._run,
                    say=say,
                )
                service = make(self._job, context)
                self._services.append(service)
                self._leaving.callback(service.close)
        self._check_columns()

    def begin(self, job: RLHFJob, *, resume: bool) -> None:
        """Opens the folder; `job` as it was written."""
        models = {role: asdict(report) for service in self._services for role, report in service.models.items()}
        if self.folder.begin(job, resume=resume, models=models):
            self.say("manifest.json could not be read and was begun anew")
        self._view.history(self.folder.steps(), self.folder.evaluations())

    async def stages(self) -> None:
        """Until the last step, or until `stop` is set. Raises the StageError that ended it, if one did."""
        await self._bus.declare()
        watch = WatchService(self._vitals, self._bus.of("view"), view=self._view)
        others = [watch, Heartbeats(self._bus, self._vitals), DeadLetterWatch(self._bus, self._vitals)]
        supervisor = Supervisor(self._vitals, stall_seconds=STALL_SECONDS, grace_seconds=GRACE_SECONDS)
        try:
            with self._view:
                await supervisor.run([*self._services, *others], self.stop)
        finally:
            await self._transport.close()
        if self._trainer.is_done and self._trainer.data_ended is not None:
            raise self._trainer.data_ended

    @property
    def is_unfinished(self) -> bool:
        return not self._trainer.is_done

    def finish(self, outcome: RunOutcome, reason: str, *, resume_command: str, console: Console) -> None:
        """The pictures; the summary is printed and kept."""
        folder = self.folder
        folder.finish(outcome, reason)
        if steps := folder.steps():
            name, evaluations = self._job.metadata.name, folder.evaluations()
            overview(steps, folder.plots / "training.png", title=name, evaluations=evaluations)
        texts = self._job.spec.observability.sample_texts
        summarize(folder, resume_command=resume_command, num_texts=texts).print(console)

    def close(self) -> None:
        """Others may write the folder again."""
        self._leaving.close()
        self.folder.close()

    def _check_columns(self) -> None:
        """What only data and rewards together can tell."""
        prompts = next(service.prompts for service in self._services if isinstance(service, PromptsService))
        for service in self._services:
            if isinstance(service, RewardService):
                service.sources.check_columns(prompts.columns)

    @property
    def _trainer(self) -> TrainerService:
        return next(service for service in self._services if isinstance(service, TrainerService))
