"""The engines of a job's generators: all of one kind, or each its own."""

from __future__ import annotations

from collections.abc import Iterator

from rlhfspec.job import RLHFJob
from rlhfspec.job.generation import EngineChoice


def of_generator(job: RLHFJob, worker: int) -> RLHFJob:
    """Return the job as that worker has it: `generation.engine` is its own."""
    engines = job.spec.roles.generator.engines or [job.spec.generation.engine]
    generation = job.spec.generation.model_copy(update={"engine": engines[worker % len(engines)]})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"generation": generation})})


def named_engines(job: RLHFJob) -> Iterator[tuple[str, EngineChoice]]:
    """Each engine that the job names, and the field that names it."""
    yield "spec.generation.engine", job.spec.generation.engine
    for index, engine in enumerate(job.spec.roles.generator.engines):
        yield f"spec.roles.generator.engines[{index}]", engine
