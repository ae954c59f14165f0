"""`rlhfspec run`: all stages of a job in one process."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

from rlhfspec.common.awake_clock import AwakeClock
from rlhfspec.common.ranks import rank_told
from rlhfspec.errors import InvalidRequest
from rlhfspec.generator.service import GeneratorService
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.weight_stores import WEIGHT_STORES
from rlhfspec.messages.loop import MOST_PENDING, workers_of
from rlhfspec.messages.records import WorkerInfo
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.moves.migration.control import DirectControl
from rlhfspec.prompts.service import PromptsService
from rlhfspec.reward.service import RewardService
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.view.view import View
from rlhfspec.runs.view.watch import WatchService
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.context import Context, GeneratorContext, Run
from rlhfspec.stage.dead_letters import DeadLetterWatch
from rlhfspec.stage.pace import Heartbeats
from rlhfspec.stage.supervisor import GRACE_SECONDS, STALL_SECONDS, Supervisor
from rlhfspec.stage.vitals import Vitals
from rlhfspec.supervisor.job_run import JobRun, Say
from rlhfspec.telemetry.opening import watching
from rlhfspec.trainer.service import TrainerService
from rlhfspec.training.data import load_tokenizer
from rlhfspec.training.weights.base import StorePlace, WeightStore
from rlhfspec.worker.ends import MoveEndpoint
from rlhfspec.worker.worker import incarnation_of


class LocalRun(JobRun):
    def __init__(self, job: RLHFJob, base_folder: Path, folder: RunFolder, view: View) -> None:
        super().__init__(job, base_folder, folder, view)
        self._run = Run(uid=secrets.token_hex(4), base_folder=base_folder, folder=folder.path)
        self._vitals = Vitals(AwakeClock())
        self._transport = MemoryTransport(clock=self._vitals.clock, max_pending=MOST_PENDING)
        workers = workers_of(job) | {"view": 1}
        self._bus = Bus(
            self._transport, job.metadata.name, uid=self._run.uid, workers=workers, clock=self._vitals.clock
        )
        self._weights: WeightStore = WEIGHT_STORES["memory"].load()(StorePlace(keep=1))  # readers hold what they got
        self._services: list[Service] = []
        self._control = DirectControl()  # between the run's generators
        self._infos: list[WorkerInfo] = []  # of generators that samples can move between

    def build(self, say: Say) -> None:
        self._refuse_ranks()
        for stage, num_workers in workers_of(self._job).items():
            make = import_module(f"rlhfspec.{stage}.build").build
            for worker in range(num_workers):
                common: dict[str, Any] = {
                    "worker": worker, "bus": self._bus.of(stage, worker), "weights": self._weights,
                    "vitals": self._vitals, "run": self._run, "say": say,
                }  # fmt: skip
                if stage == "generator":
                    endpoint = self._move_endpoint(worker) if num_workers > 1 else None
                    context: Context = GeneratorContext(**common, move_endpoint=endpoint)
                else:
                    context = Context(**common)
                service = make(self._job, context)
                self._services.append(service)
                self._leaving.callback(service.close)
        self._check_columns()
        if self.serve_port is not None:
            self._services.append(gateway := self._gateway(self.serve_port))
            self._leaving.callback(gateway.close)

    def _gateway(self, port: int) -> Service:
        from rlhfspec.door.server import PolicyDoor
        from rlhfspec.gateway.service import LocalGateway

        calls = next(service for service in self._services if isinstance(service, GeneratorService)).for_clients()
        tokenizer = load_tokenizer(self._job.spec.model)
        door = PolicyDoor(calls, tokenizer, name=self._job.metadata.name, run=self.folder)
        return LocalGateway(self._vitals, door, port, self.say)

    def _move_endpoint(self, worker: int) -> MoveEndpoint:
        info = WorkerInfo(
            id=incarnation_of("generator", worker),
            job=self._job.metadata.name,
            stage="generator",
            worker=worker,
            host=socket.gethostname(),
            pid=os.getpid(),
            grpc_address="",
            http_address="",
        )
        self._infos.append(info)
        return MoveEndpoint.direct(info.id, self._control)

    def begin(self) -> None:
        models = {role: asdict(report) for service in self._services for role, report in service.models.items()}
        self.folder.loaded(models)

    async def stages(self) -> None:
        observability = self._job.spec.observability
        traced = self.folder.path if observability.traces else None
        with watching(self._bus.job, self._run.uid, run=traced, otlp_endpoint=observability.otlp_endpoint) as watched:
            self._bus.watcher = watched.watcher
            self._vitals.told = watched.meters.worked if watched.meters else None
            await self._supervised()
        if self._trainer.is_done and self._trainer.ended_early is not None:
            raise self._trainer.ended_early

    async def _supervised(self) -> None:
        await self._bus.declare()
        for info in self._infos:
            await self._bus.publish(info)
        watch = WatchService(self._vitals, self._bus.of("view"), view=self._view)
        others = [watch, Heartbeats(self._bus, self._vitals), DeadLetterWatch(self._bus, self._vitals)]
        supervisor = Supervisor(self._vitals, stall_seconds=STALL_SECONDS, grace_seconds=GRACE_SECONDS)
        try:
            with self._view:
                await supervisor.run([*self._services, *others], self.stop)
        finally:
            await self._transport.close()

    @property
    def is_unfinished(self) -> bool:
        return not self._trainer.is_done

    def _check_columns(self) -> None:
        prompts = next(service.prompts for service in self._services if isinstance(service, PromptsService))
        for service in self._services:
            if isinstance(service, RewardService):
                service.sources.check_columns(prompts.columns)

    def _refuse_ranks(self) -> None:
        trainer = self._job.spec.roles.trainer
        if trainer.ranks not in (1, rank_told(os.environ).num_ranks):
            nodes = f"--nnodes {trainer.nodes} " if trainer.nodes > 1 else ""
            problem = f"needs --processes, or torchrun {nodes}--nproc-per-node {trainer.ranks_per_node}"
            field = "nodes" if trainer.nodes > 1 else "ranksPerNode"
            value = trainer.nodes if trainer.nodes > 1 else trainer.ranks_per_node
            raise InvalidRequest(f"spec.roles.trainer.{field}", value, problem)
        if (parts := self._job.spec.num_processes("generator")) > 1:
            raise InvalidRequest("spec.roles.generator.tensorParallel", parts, "needs --processes")

    @property
    def _trainer(self) -> TrainerService:
        return next(service for service in self._services if isinstance(service, TrainerService))
