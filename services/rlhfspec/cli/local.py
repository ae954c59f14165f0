"""`rlhfspec run`: every stage of a job in one process, over the memory transport.

Parts are made first, and whatever a user can mend is said then; only then the stages start. The run folder is there
before the first step and is finished however the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from rlhfspec.checkpoint import CheckpointStore, export_hf
from rlhfspec.cli.recorder import RunRecorder
from rlhfspec.cli.texts import before_and_after
from rlhfspec.cli.watch import WatchService
from rlhfspec.critic.service import CriticService
from rlhfspec.data import Prompts, load_rows, load_tokenizer
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine
from rlhfspec.engine.loading import make_engine
from rlhfspec.errors import DataExhausted, InvalidRequest
from rlhfspec.generator.service import GeneratorService
from rlhfspec.huggingface.causal_lm import max_positions
from rlhfspec.huggingface.check import ModelReport, report_of
from rlhfspec.huggingface.loading import load_model
from rlhfspec.job import RLHFJob
from rlhfspec.learning.algorithms import scoring_stages
from rlhfspec.learning.distributed import Leader, Ranks
from rlhfspec.learning.learner import Learner
from rlhfspec.modeling.critic import load_critic
from rlhfspec.modeling.loading import load_reference
from rlhfspec.prompts.service import PromptsService
from rlhfspec.reference.service import ReferenceService
from rlhfspec.reward.service import RewardService
from rlhfspec.scoring.log_probs import LogProbScorer
from rlhfspec.scoring.rewards.sources import RewardSources
from rlhfspec.scoring.values import ValueScorer
from rlhfspec.service.base import Service
from rlhfspec.service.bus import Bus
from rlhfspec.service.dead_letters import DeadLetterWatch
from rlhfspec.service.supervisor import Supervisor
from rlhfspec.service.vitals import Vitals
from rlhfspec.telemetry.manifest import Outcome
from rlhfspec.telemetry.plots import overview
from rlhfspec.telemetry.run_folder import Opening, RunFolder
from rlhfspec.telemetry.summary import summarize
from rlhfspec.telemetry.trackers import Trackers, check_packages
from rlhfspec.telemetry.view import View
from rlhfspec.trainer.service import TrainerService
from rlhfspec.transport.memory import MemoryTransport
from rlhfspec.weights import MemoryWeightStore

Say = Callable[[str], None]
MOST_PENDING = 1 << 20  # messages of a subject: several steps of any job that one process can run
STALL_SECONDS = 300.0  # so long everybody may wait for somebody
GRACE_SECONDS = 120.0  # for the trainer to end its step and write a checkpoint
KEPT_VERSIONS = 2  # beyond what staleness needs


@dataclass(slots=True, kw_only=True)
class Parts:
    """Everything a run is made of, ready to start. `job` has its `tiny:` names resolved."""

    job: RLHFJob
    tokenizer: Any
    prompts: Prompts
    sources: RewardSources
    policy: Any  # the model that is trained
    learner: Learner | Leader
    engines: list[Engine]
    references: list[LogProbScorer]
    critics: list[ValueScorer]

    @property
    def last_step(self) -> int:
        """The data may end before the job's steps do."""
        steps = self.job.spec.training.steps
        return min(steps, self.prompts.order.last_step or steps)

    @property
    def reports(self) -> dict[str, ModelReport]:
        """By role: how its model was found right."""
        engines = self.engines[0].reports
        found = {"generator": engines["model"], "trainer": report_of(self.policy)}
        found |= {"drafter": engines["drafter"]} if "drafter" in engines else {}
        found |= {"reference": self.references[0].report} if self.references else {}
        return found | ({"critic": self.critics[0].report} if self.critics else {})

    def export(self, folder: Path) -> None:
        export_hf(
            folder,
            self.learner.policy_state(),
            self.policy.config,
            tokenizer=self.tokenizer,
            generation_config=self.policy.generation_config,
        )


def make_parts(job: RLHFJob, base_folder: Path, say: Say, ranks: Ranks) -> Parts:
    """Loads data, rewards and models. Raises InvalidRequest for whatever a user can mend."""
    spec = job.spec
    say("reading the data")
    tokenizer = load_tokenizer(spec.model)
    rows = load_rows(spec.dataset, base_folder)
    prompts = Prompts(rows, tokenizer, spec.dataset, spec.training.seed, spec.training.prompts_per_step)
    sources = RewardSources(spec.rewards, base_folder)
    sources.check_columns(prompts.columns)
    check_packages(job)
    say("loading the policy")
    learner = Learner.from_spec(spec, ranks=ranks)
    max_context = _max_context(job, prompts.longest, max_positions(learner.policy))
    stages = scoring_stages(spec.algorithm)
    references = []
    if "reference" in stages:
        say("loading the reference")
        references = [_reference(job, max_context) for _ in range(spec.roles.reference.workers)]
    critics = []
    if "critic" in stages:
        critics = [_critic(job, max_context) for _ in range(spec.roles.critic.workers)]
    say("making the engine ready, and measuring what a step costs")
    engines = [_engine(job, tokenizer, max_context) for _ in range(spec.roles.generator.workers)]
    return Parts(
        job=job,
        tokenizer=tokenizer,
        prompts=prompts,
        sources=sources,
        policy=learner.policy,
        learner=Leader(learner, ranks) if ranks.num_ranks > 1 else learner,
        engines=engines,
        references=references,
        critics=critics,
    )


def _max_context(job: RLHFJob, longest: int, limit: int | None) -> int:
    """Tokens of the longest prompt and the longest response together. limit: the model's positions."""
    wanted = job.spec.generation.max_tokens
    if limit is None or longest + wanted <= limit:
        return longest + wanted
    room = limit - longest
    said = f"the longest prompt has {longest} tokens, and the model {limit} positions"
    if room < 1:
        raise InvalidRequest("spec.dataset.maxPromptTokens", job.spec.dataset.max_prompt_tokens, f"{said}: lower it")
    raise InvalidRequest("spec.generation.maxTokens", wanted, f"{said}: must be <= {room}")


def _engine(job: RLHFJob, tokenizer: Any, max_context: int) -> Engine:
    model, generation = job.spec.model, job.spec.generation
    config = EngineConfig(
        dtype=generation.dtype,
        speculation=generation.speculation.mode,
        max_sequences=min(generation.max_sequences, _samples_in_flight(job)),
        max_context=max_context,
        kv_cache_tokens=generation.kv_cache_tokens,
    )
    target = load_model(model.path, field="spec.model.path")
    draft = None
    if generation.speculation.mode in ("model", "adaptive") and model.drafter is not None:
        draft = load_model(model.drafter, field="spec.model.drafter")
    return make_engine(target, config, draft=draft, tokenizer=tokenizer)


def _critic(job: RLHFJob, max_context: int) -> ValueScorer:
    """A copy of the learner's critic; its weights come with the first version that is handed out."""
    return ValueScorer(load_critic(job.spec.model, max_context=max_context), max_context=max_context)


def _told(step: int, opening: Opening) -> Iterator[str]:
    if not step:
        yield "no checkpoint yet: beginning from the first step"
        return
    dropped = opening.num_dropped_steps
    again = f"; {dropped} later {'step is' if dropped == 1 else 'steps are'} done again" if dropped else ""
    yield f"resuming after step {step}{again}"
    if opening.missing_steps:
        yield f"steps.jsonl lacks steps {', '.join(map(str, opening.missing_steps))}: the curve has a gap there"


def _samples_in_flight(job: RLHFJob) -> int:
    training = job.spec.training
    return training.prompts_per_step * job.spec.algorithm.samples_per_prompt * (1 + training.max_staleness)


def _reference(job: RLHFJob, max_context: int) -> LogProbScorer:
    """In the precision in which the trainer computes: the KL must not measure a difference of rounding."""
    spec = job.spec
    dtype = spec.generation.dtype if spec.training.exact_on_policy else spec.model.dtype
    if spec.training.autocast == "bfloat16":
        dtype = "bfloat16"
    return LogProbScorer(
        load_reference(spec.model, max_context=max_context),
        temperature=spec.generation.temperature,
        max_context=max_context,
        dtype=dtype,
    )


class Run:
    """One run of a job in one folder: `begin`, `stages`, `finish`."""

    def __init__(self, parts: Parts, folder: RunFolder, view: View) -> None:
        self.parts = parts
        self.folder = folder
        self.vitals = Vitals()
        self.stop = asyncio.Event()
        self.say = view.say
        self._view = view
        self._checkpoints: CheckpointStore | None = None
        self._began_at = 0

    @property
    def is_unfinished(self) -> bool:
        return self.parts.learner.version < self.parts.last_step

    def begin(self, job: RLHFJob, *, resume: bool) -> list[str]:
        """Opens the folder, and on resuming takes over the last checkpoint. What a person should know of it."""
        keep = job.spec.checkpoint.keep
        if resume and self.folder.checkpoints.is_dir():
            self._checkpoints = CheckpointStore(self.folder.checkpoints, keep=keep)
        step = (self._checkpoints.latest() or 0) if self._checkpoints else 0
        models = {role: asdict(report) for role, report in self.parts.reports.items()}
        opening = self.folder.begin(job, resume=resume, resume_at=step, models=models)
        self._checkpoints = self._checkpoints or CheckpointStore(self.folder.checkpoints, keep=keep)
        self._began_at = step
        if step:
            self.parts.learner.load_state(self._checkpoints.load(step)["learner"])
            self._checkpoints.discard_after(step)
            self._view.history(self.folder.steps())
        return list(_told(step, opening)) if resume else []

    def close(self) -> None:
        """Others may write the folder again."""
        if isinstance(self.parts.learner, Leader):
            self.parts.learner.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self.folder.close()

    async def stages(self) -> None:
        """Until the last step, or until `stop` is set. Raises the StageError that ended it, if one did."""
        parts, job = self.parts, self.parts.job
        assert self._checkpoints is not None, "begin comes first"
        with Trackers(job, self.folder, resume_at=self._began_at) as trackers, self._view:
            recorder = RunRecorder(job, self.folder, self._checkpoints, trackers, self.vitals)
            transport = MemoryTransport(max_pending=MOST_PENDING)
            bus = await Bus.open(transport, job.metadata.name, workers=self._workers(), clock=self.vitals.clock)
            services = [*self._services(bus, recorder), self._watch(bus, recorder), DeadLetterWatch(bus, self.vitals)]
            supervisor = Supervisor(self.vitals, stall_seconds=STALL_SECONDS, grace_seconds=GRACE_SECONDS)
            try:
                await supervisor.run(services, self.stop)
            finally:
                await transport.close()
        if parts.last_step < job.spec.training.steps and not self.is_unfinished:
            raise DataExhausted(parts.last_step, len(parts.prompts), job.spec.dataset.epochs or 1)

    def finish(self, outcome: Outcome, reason: str, *, resume_command: str, console: Console) -> None:
        """Pictures, the exported policy, texts before and after; the summary is printed and kept."""
        parts, folder = self.parts, self.folder
        folder.finish(outcome, reason)
        steps = folder.steps()
        if steps:
            overview(steps, folder.plots / "training.png", title=parts.job.metadata.name)
        if outcome == "completed" and parts.job.spec.checkpoint.export:
            parts.export(folder.export)
        before, after = before_and_after(parts, folder) if outcome == "completed" else ([], [])
        summarize(folder, resume_command=resume_command, before=before, after=after).print(console)

    def _workers(self) -> dict[str, int]:
        parts, roles = self.parts, self.parts.job.spec.roles
        counts = {
            "prompts": 1,
            "generator": len(parts.engines),
            "reward": roles.reward.workers,
            "reference": len(parts.references),
            "critic": len(parts.critics),
            "trainer": 1,
            "view": 1,
        }
        return {name: count for name, count in counts.items() if count}

    def _services(self, bus: Bus, recorder: RunRecorder) -> Iterator[Service]:
        parts, job, vitals = self.parts, self.parts.job, self.vitals
        weights = MemoryWeightStore(keep=KEPT_VERSIONS + job.spec.training.max_staleness)
        yield PromptsService(0, vitals, bus.of("prompts"), job=job, prompts=parts.prompts, last_step=parts.last_step)
        for worker, engine in enumerate(parts.engines):
            yield GeneratorService(worker, vitals, bus.of("generator", worker), job=job, engine=engine, weights=weights)
        for worker in range(job.spec.roles.reward.workers):
            yield RewardService(worker, vitals, bus.of("reward", worker), job=job, sources=parts.sources)
        for worker, scorer in enumerate(parts.references):
            yield ReferenceService(worker, vitals, bus.of("reference", worker), job=job, scorer=scorer)
        for worker, values in enumerate(parts.critics):
            yield CriticService(worker, vitals, bus.of("critic", worker), job=job, scorer=values, weights=weights)
        yield TrainerService(
            0,
            vitals,
            bus.of("trainer"),
            job=job,
            learner=parts.learner,
            weights=weights,
            recorder=recorder,
            last_step=parts.last_step,
        )

    def _watch(self, bus: Bus, recorder: RunRecorder) -> Service:
        return WatchService(self.vitals, bus.of("view"), view=self._view, heard=recorder.load)
