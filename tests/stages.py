"""Stage tests without a model, on a fake clock: without `advance` no timeout ever fires."""

import asyncio
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from example_records import example_evaluation
from small_job import JOB

from rlhfspec.engine import base
from rlhfspec.generator.service import GeneratorService
from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import DatasetInfo, Prompt, Record, Sample, Score, Weights
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import StepMetrics, example_step
from rlhfspec.messages.transport.clock import Clock, FakeClock
from rlhfspec.messages.transport.memory import MemoryTransport
from rlhfspec.messages.transport.memory_subjects import WorkSubject
from rlhfspec.prompts.service import PromptsService
from rlhfspec.reward.service import RewardService
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.context import GeneratorContext, Run
from rlhfspec.stage.guest import HostedScoring
from rlhfspec.stage.vitals import Vitals
from rlhfspec.tiny.tokenizer import encode
from rlhfspec.trainer.collector import Collector
from rlhfspec.trainer.recorder import Trained
from rlhfspec.trainer.service import TrainerService
from rlhfspec.training.data import Prompts, Rows
from rlhfspec.training.learning.learner import LearnReport
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.training.weights import MemoryWeightStore
from rlhfspec.training.weights.base import weights_record

THREAD_SECONDS = 60.0  # so long a test waits for a thread before it fails


class ByteTokenizer:
    def __call__(self, texts: list[str], *, add_special_tokens: bool = True) -> Mapping[str, list[list[int]]]:
        return {"input_ids": [encode(text) for text in texts]}


def prompts_for(job: RLHFJob) -> Prompts:
    rows = Rows(source="sums", records=[{"prompt": f"{number}+1="} for number in range(5)])
    return Prompts(rows, ByteTokenizer(), job.spec.dataset, seed=0, prompts_per_step=job.spec.training.prompts_per_step)


class FakeEngine:
    """Engine whose responses are two tokens of the sample's seed; the next sequence to end is random."""

    def __init__(self, draw: random.Random) -> None:
        self.rows = 1024
        self._draw = draw
        self._requests: list[base.Request] = []
        self.weights_version = 0
        self.submitted: list[str] = []

    @property
    def abilities(self) -> base.Abilities:
        return base.Abilities()

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, request: base.Request) -> None:
        self._requests.append(request)
        self.submitted.append(request.id)

    def step(self) -> base.EngineStep:
        request = self._requests.pop(self._draw.randrange(len(self._requests)))
        done = base.Completion(
            id=request.id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=(request.seed % 90, 1),
            log_probs=(-0.5, -0.1),
            tempered_log_probs=(-0.5, -0.1),
            weights_versions=(self.weights_version,) * 2,
            finish_reason="stop",
            text=str(request.seed % 90),
            stats=base.SequenceStats(num_verifications=2),
        )
        return base.EngineStep(
            gains=(base.Gain.of_completion(done),), finished=(done,),
            num_decoding=1, num_prefill_tokens=0, num_verified_nodes=1, num_committed=2,
            strategy="off", seconds=0.001,
        )  # fmt: skip

    def sequences(self) -> tuple[base.SequenceView, ...]:
        nothing: Any = {"num_generated": 0, "num_prefill": 0, "is_waiting": False}
        held = ((request.id, len(request.prompt_token_ids)) for request in self._requests)
        return tuple(base.SequenceView(id=id, num_held=number, **nothing) for id, number in held)

    def load_weights(self, state_dict: dict[str, Any], *, version: int) -> None:
        assert version > self.weights_version
        assert float(state_dict["w"][0]) == version, "the weights of that version"
        self.weights_version = version

    def stats(self) -> base.EngineStats:
        return base.EngineStats(
            num_running=len(self._requests), num_waiting=0, room=self.rows - len(self._requests),
            num_free_blocks=0, num_blocks=0,
            weights_version=self.weights_version, num_steps=0, num_generated_tokens=0, num_preemptions=0,
        )  # fmt: skip


class FakeSources:
    concurrency = 4

    def __init__(self, grouping: Literal["sample", "group"] = "sample", rewards: Mapping[str, float] | None = None):
        self.grouping = grouping
        self.calls: list[list[str]] = []
        self._rewards = rewards or {}

    def check_columns(self, columns: Mapping[str, str]) -> None:
        pass

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def score_many(self, samples: Sequence[Sample], *_: Any) -> list[Score]:
        self.calls.append([sample.id for sample in samples])
        await asyncio.sleep(0)
        return [reward_of(sample.id, self._rewards.get(sample.id, float(len(sample.text)))) for sample in samples]


def reward_of(sample_id: str, value: float, *, error: str = "") -> Score:
    step, values = int(sample_id.split("/")[1]), () if error else (value,)
    place: Any = {"id": f"{sample_id}/reward", "sample_id": sample_id, "job": JOB, "step": step, "stage": "reward"}
    return Score(values=values, error=error, **place)


class FakeLearner:
    """Learner whose one weight is its version, with the generator's log-probs."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.learnt: list[Rollouts] = []

    def learn(self, rollouts: Rollouts) -> LearnReport:
        self.version += 1
        self.learnt.append(rollouts)
        zeros = torch.zeros(rollouts.num_tokens)
        log_probs = rollouts.log_probs
        return LearnReport(
            version=self.version,
            metrics={},
            advantages=zeros,
            log_probs=zeros,
            untempered_log_probs=log_probs,
            has_run=torch.ones_like(log_probs, dtype=torch.bool),
        )

    def policy_state(self) -> dict[str, Any]:
        return {"w": torch.tensor([float(self.version)])}

    def critic_state(self) -> dict[str, Any]:
        return self.policy_state()

    def state(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state(self, state: dict[str, Any]) -> None:
        self.version = state["version"]


class FakeRecorder:
    def __init__(self) -> None:
        self.trained: list[Trained] = []
        self.checkpoints: list[int] = []
        self.evaluations: dict[int, tuple[Sample, ...]] = {}
        self.is_finished = False
        self.collapse = ""

    def restore(self) -> dict[str, Any] | None:
        return {"version": self.checkpoints[-1]} if self.checkpoints else None

    def evaluate(self, collected: Collector, seconds: float) -> Evaluation:
        self.evaluations[collected.shape.step] = collected.collected().all_samples
        return example_evaluation(step=collected.shape.step)

    def is_evaluated(self, step: int) -> bool:
        return step in self.evaluations

    def record(self, trained: Trained) -> StepMetrics:
        self.trained.append(trained)
        return example_step(step=trained.step)

    def finish(self, step: int, policy_state: Callable[[], dict[str, Any]]) -> None:
        self.is_finished = True

    def close(self) -> None:
        pass

    def checkpoint(self, step: int, state: dict[str, Any]) -> None:
        assert state == {"version": step}
        self.checkpoints.append(step)


class Stages:
    def __init__(self, bus: Bus, transport: MemoryTransport, clock: Clock, job: RLHFJob, seed: int = 0) -> None:
        self.bus, self.transport, self.clock, self.job = bus, transport, clock, job
        self.vitals = Vitals(clock)
        self.draw = random.Random(seed)
        self.weights = MemoryWeightStore(keep=2 + job.spec.training.max_staleness)
        self.learner, self.recorder = FakeLearner(), FakeRecorder()
        self.engines: list[FakeEngine] = []

    @classmethod
    async def open(cls, job: RLHFJob, clock: Clock | None = None, *, seed: int = 0, **workers: int) -> "Stages":
        clock = clock or FakeClock()
        transport = MemoryTransport(clock=clock)
        bus = await Bus.open(transport, JOB, workers=workers, clock=clock)
        await bus.publish(DatasetInfo(id=f"{JOB}/dataset", job=JOB, num_prompts=5, num_held_out=3, last_step=0))
        return cls(bus, transport, clock, job, seed)

    def prompts(self) -> PromptsService:
        prompts = prompts_for(self.job)
        held_out = prompts if self.job.spec.evaluation else None
        return PromptsService(0, self.vitals, self.bus.of("prompts"), job=self.job, prompts=prompts, held_out=held_out)

    def generator(
        self, worker: int = 0, engine: Any = None, *, folder: Path = Path(), hosted_scoring: HostedScoring | None = None
    ) -> GeneratorService:
        engine = engine or FakeEngine(self.draw)
        self.engines.append(engine)
        context = GeneratorContext(
            worker=worker, bus=self.bus.of("generator", worker), weights=self.weights, vitals=self.vitals,
            run=Run(uid=self.bus.uid, base_folder=folder, folder=folder), say=print, hosted_scoring=hosted_scoring,
        )  # fmt: skip
        return GeneratorService(self.job, context, engine)

    def reward(self, sources: Any, worker: int = 0) -> RewardService:
        return RewardService(worker, self.vitals, self.bus.of("reward", worker), job=self.job, sources=sources)

    def trainer(self) -> TrainerService:
        parts: Any = {"learner": self.learner, "weights": self.weights, "recorder": self.recorder}
        return TrainerService(0, self.vitals, self.bus.of("trainer"), job=self.job, **parts)

    async def publish(self, stage: str, *records: Record) -> None:
        for record in records:
            await self.bus.of(stage).publish(record)

    async def redeliver(self, record_type: type[Prompt] | type[Sample], stage: str) -> None:
        await self.transport.release(self.bus.subject(record_type), stage)

    def has_read(self, stage: str) -> bool:
        subjects = self.transport._subjects.values()
        stored = [message for s in subjects if isinstance(s, WorkSubject) for message in s.stored.values()]
        return not any(stage in message.owed for message in stored)

    def stored(self) -> dict[str, list[str]]:
        subjects = self.transport._subjects
        return {
            name.rpartition(".")[2]: [m.id for m in s.stored.values()]
            for name, s in subjects.items()
            if isinstance(s, WorkSubject) and s.stored
        }


def a_prompt(number: int) -> Prompt:
    return Prompt(
        id=f"{JOB}/1/{number}/0", job=JOB, step=1, prompt=number, replica=0, text="1+1=", token_ids=(5, 6),
        columns_json="{}", seed=number, weights_version=0,
    )  # fmt: skip


def policy_weights(version: int) -> Weights:
    return weights_record(JOB, "policy", version, uri=f"memory:{version}", digest="00")


async def ends(task: asyncio.Task[None], service: Service) -> None:
    """Assert that the service ends when asked to, without a clock advance."""
    await service.stop()
    await asyncio.wait([task], timeout=THREAD_SECONDS)
    assert task.done(), f"{service.stage} goes on after it was asked to stop"
    service.close()
    task.result()


async def killed(task: asyncio.Task[None], service: Service) -> None:
    """Kill the service as far as possible in one process: its thread finishes its call unheard."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    service.close()
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith(f"{service.stage}-")]:
        await asyncio.to_thread(thread.join, 10.0)
