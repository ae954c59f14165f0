"""THE MAP: every stage, what it consumes and produces, what it waits for, and who unblocks it.

Subjects, consumers, service folders, chart keys and the supervisor's messages derive from this table.
Adding a stage is one line here; the tests then say what is missing.

Example:
    >>> subject("sums", Sample)
    'rlhf.sums.sample'
    >>> [stage.name for stage in consumers_of(Sample)]
    ['reward', 'reference', 'critic', 'trainer']
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhfspec.records import Demand, Load, Prompt, Record, Sample, Score, StepReport, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    consumes: tuple[type[Record], ...]
    produces: tuple[type[Record], ...]
    waits_for: str
    unblocked_by: tuple[str, ...]


STAGES: tuple[Stage, ...] = (
    Stage(
        name="prompts",
        consumes=(Weights, Demand),
        produces=(Prompt,),
        waits_for="a weights version not older than the step allows",
        unblocked_by=("trainer",),
    ),
    Stage(
        name="generator",
        consumes=(Prompt, Weights),
        produces=(Sample, Load),
        waits_for="prompts, and room in the KV cache",
        unblocked_by=("prompts", "trainer"),
    ),
    Stage(
        name="reward",
        consumes=(Sample,),
        produces=(Score,),
        waits_for="finished samples",
        unblocked_by=("generator",),
    ),
    Stage(
        name="reference",
        consumes=(Sample,),
        produces=(Score,),
        waits_for="finished samples",
        unblocked_by=("generator",),
    ),
    Stage(
        name="critic",
        consumes=(Sample, Weights),
        produces=(Score,),
        waits_for="finished samples, and the critic's weights",
        unblocked_by=("generator", "trainer"),
    ),
    Stage(
        name="trainer",
        consumes=(Sample, Score),
        produces=(Weights, Demand, StepReport),
        waits_for="every sample of the step and every score of a sample",
        unblocked_by=("generator", "reward", "reference", "critic"),
    ),
)
# Who looks on. An observer produces nothing and no stage waits for it; what it sees is kept until it acknowledged it.
OBSERVERS: tuple[Stage, ...] = (
    Stage(
        name="view",
        consumes=(Sample, Load, StepReport),
        produces=(),
        waits_for="something to show",
        unblocked_by=("generator", "trainer"),
    ),
)
BY_NAME = {stage.name: stage for stage in (*STAGES, *OBSERVERS)}
# Every worker of a stage gets each of these; for all other records the workers of a stage compete.
TO_EVERY_WORKER: tuple[type[Record], ...] = (Weights,)


def subject(job: str, record: type[Record]) -> str:
    """Where records of this type travel."""
    return f"rlhf.{job}.{record.__name__.lower()}"


def dead_letters(job: str) -> str:
    """Where records go that nobody could handle."""
    return f"rlhf.{job}.dead"


def consumers_of(record: type[Record]) -> list[Stage]:
    return [stage for stage in STAGES if record in stage.consumes]


def consumer_name(record: type[Record], stage: str, worker: int) -> str:
    """As whom this worker pulls these records: workers that share a name compete.

    >>> consumer_name(Sample, "reward", 1), consumer_name(Weights, "generator", 1)
    ('reward', 'generator-1')
    """
    return f"{stage}-{worker}" if record in TO_EVERY_WORKER else stage
