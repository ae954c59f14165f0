"""Stages of the training loop: the records that each consumes and produces, and the stages that unblock it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from rlhfspec.job import Algorithm, RLHFJob
from rlhfspec.job.roles import Work
from rlhfspec.messages.records import (
    DatasetInfo,
    Demand,
    DraftWeights,
    EvaluationReport,
    Heartbeat,
    Load,
    Move,
    Moved,
    Plan,
    Prompt,
    Record,
    Sample,
    Score,
    ScoringStage,
    StepReport,
    Weights,
    WorkerInfo,
)
from rlhfspec.messages.transport.base import Consumer, Kind

# A dead worker's records are redelivered after this time; a living worker extends the lease earlier.
ACK_WAIT_SECONDS = 12.0
# Work is kept until every consuming stage has acknowledged it. State keeps the latest record per key, which a new
# process sees first. A signal may be lost, and publishers never wait for its readers.
KINDS: dict[type, Kind] = {
    Prompt: "work", Sample: "work", Score: "work", Demand: "work",
    Weights: "state", DraftWeights: "state", DatasetInfo: "state", WorkerInfo: "state",
    Load: "signal", StepReport: "signal", EvaluationReport: "signal", Heartbeat: "signal",
    Move: "signal", Moved: "signal", Plan: "signal",
}  # fmt: skip
MOST_PENDING = 1 << 20  # messages of a subject: several steps of any job
# Records that processes of every stage publish, and records that processes of every stage may read.
OF_A_PROCESS: tuple[type[Record], ...] = (Heartbeat, WorkerInfo)
SEEN_BY_ALL: tuple[type[Record], ...] = (WorkerInfo,)
LAST_DECLARED = WorkerInfo  # declared last, so its existence implies all others; every process may query it


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Stage of the training loop, with its record types and limits.

    `max_held` limits the unacknowledged records of one type over all its workers. After `max_deliveries` a record
    becomes a dead letter (None: never). Records in `watches` must not affect tokens or curves.
    """

    name: str
    consumes: tuple[type[Record], ...]
    produces: tuple[type[Record], ...]
    waits_for: str
    unblocked_by: tuple[str, ...]
    max_held: int = 1024
    max_deliveries: int | None = 20  # each death or exit of a worker costs one delivery of all records it held
    watches: tuple[type[Record], ...] = ()


STAGES: tuple[Stage, ...] = (
    Stage(
        name="prompts",
        consumes=(Weights, Demand),
        produces=(Prompt, DatasetInfo),
        waits_for="a weights version that is new enough for the step",
        unblocked_by=("trainer",),
        watches=(Sample,),  # their response lengths; prompts with long responses go first
    ),
    Stage(
        name="generator",
        consumes=(Prompt, Weights),
        produces=(Sample, Load, Moved, DraftWeights),
        waits_for="prompts, and room in the KV cache",
        unblocked_by=("prompts", "trainer"),
        watches=(Move, Plan, DraftWeights, Load),  # prefill workers: the room of the others
        max_held=1 << 16,  # the engine queues sequences that it has no room for
    ),
    Stage(
        name="reward",
        consumes=(Sample, DatasetInfo),
        produces=(Score,),
        waits_for="finished samples",
        unblocked_by=("prompts", "generator"),
        max_held=1 << 16,  # incomplete groups
    ),
    Stage(
        name="reference",
        consumes=(Sample,),
        produces=(Score,),
        waits_for="finished samples",
        unblocked_by=("generator",),
        max_held=64,
    ),
    Stage(
        name="critic",
        consumes=(Sample, Weights),
        produces=(Score,),
        waits_for="finished samples, and the critic's weights",
        unblocked_by=("generator", "trainer"),
        max_held=64,
    ),
    Stage(
        name="trainer",
        consumes=(Sample, Score, DatasetInfo),
        produces=(Weights, Demand, StepReport, EvaluationReport),
        waits_for="all samples of the step and all their scores",
        unblocked_by=("prompts", "generator", "reward", "reference", "critic"),
        max_held=1 << 20,  # until a checkpoint covers their step
        max_deliveries=None,  # each crash of a trainer counts as a delivery of all its records
    ),
    Stage(
        name="rebalancer",
        consumes=(),
        produces=(Move, Plan),
        waits_for="load reports of the generators",
        unblocked_by=(),  # no stage waits for it, and it needs nothing
        watches=(Load, Moved, Sample),  # samples tell their final length
    ),
)
# Clients of the policy are served by a process of its own, if the run is started with --serve.
GATEWAY = Stage(name="gateway", consumes=(), produces=(), waits_for="requests of clients", unblocked_by=())
SUPERVISED = (*STAGES, GATEWAY)
# Observers watch and produce nothing, and no stage waits for them.
OBSERVERS: tuple[Stage, ...] = (
    Stage(
        name="view",
        consumes=(Sample, Load, Moved, Plan, StepReport, EvaluationReport, Heartbeat, WorkerInfo),
        produces=(),
        waits_for="something to show",
        unblocked_by=("generator", "trainer"),
    ),
)
BY_NAME = {stage.name: stage for stage in (*SUPERVISED, *OBSERVERS)}


def subject(job: str, uid: str, record: type) -> str:
    return f"rlhf.{job}.{uid}.{record.__name__.lower()}"


def dead_letters(job: str, uid: str) -> str:
    """Return the state subject for records that no worker could handle."""
    return f"rlhf.{job}.{uid}.dead"


def state_key(record: Record) -> str:
    """Return the record's key; a state subject keeps only the latest record of each key."""
    if isinstance(record, WorkerInfo):
        return f"{record.stage}-{record.worker}"
    return record.role if isinstance(record, Weights) else ""


def consumers_of(record: type[Record]) -> list[Stage]:
    return [stage for stage in STAGES if record in stage.consumes]


def work_consumer(stage: Stage) -> Consumer:
    return Consumer(
        name=stage.name,
        ack_wait_seconds=ACK_WAIT_SECONDS,
        max_deliveries=stage.max_deliveries,
        max_unacknowledged=stage.max_held,
    )


class Declaration(NamedTuple):
    subject: str
    kind: Kind
    consumers: tuple[Consumer, ...] = ()


def declarations(job: str, uid: str, running: Collection[str]) -> list[Declaration]:
    """Return the declarations of a run's subjects, in order; only stages in `running` get consumers."""
    made = [_declaration(job, uid, record, running) for record in KINDS if record is not LAST_DECLARED]
    return [*made, Declaration(dead_letters(job, uid), "state"), _declaration(job, uid, LAST_DECLARED, running)]


def _declaration(job: str, uid: str, record: type, running: Collection[str]) -> Declaration:
    kind = KINDS[record]
    stages = [stage for stage in consumers_of(record) if stage.name in running] if kind == "work" else []
    return Declaration(subject(job, uid, record), kind, tuple(map(work_consumer, stages)))


def scoring_stages(algorithm: Algorithm) -> tuple[ScoringStage, ...]:
    """Return the stages that must score a sample before training."""
    stages: list[ScoringStage] = ["reward"]
    if algorithm.kl_coefficient > 0:
        stages.append("reference")
    if algorithm.entry.has_critic:
        stages.append("critic")
    return tuple(stages)


def workers_of(job: RLHFJob, *, is_served: bool = False) -> dict[str, int]:
    """Return the number of workers per stage of the job, and the gateway if clients are served."""
    roles = job.spec.roles
    running = {"prompts", "generator", "trainer", *scoring_stages(job.spec.algorithm)}
    if job.spec.moves_samples:
        running.add("rebalancer")
    counts = {stage.name: getattr(roles, stage.name).workers for stage in STAGES if stage.name in running}
    counts |= {name: 1 for name in ("prompts", "trainer", "rebalancer") if name in counts}
    return counts | ({GATEWAY.name: 1} if is_served else {})


def deadline_of(job: RLHFJob, stage: str) -> float:
    """Return the time limit of one piece of a stage's work, in seconds."""
    role: Work = getattr(job.spec.roles, stage, Work())
    return role.deadline_seconds
