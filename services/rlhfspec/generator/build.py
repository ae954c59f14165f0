from __future__ import annotations

import signal
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from rlhfspec.generator.group import joined_by, led
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.engines import ENGINES
from rlhfspec.stage.context import GeneratorContext

if TYPE_CHECKING:
    from rlhfspec.generator.service import GeneratorService


def build(job: RLHFJob, context: GeneratorContext) -> GeneratorService:
    from rlhfspec.generator.service import GeneratorService
    from rlhfspec.training.data import load_tokenizer

    context.say("loading the engine and measuring its step times")
    entry = ENGINES[job.spec.generation.engine.name]
    make = entry.load()
    with ExitStack() as leaving:
        if entry.takes_a_group and (ranks := leaving.enter_context(led(job))) is not None:
            make = partial(make, group=ranks)
        engine: Any = make(job, partial(load_tokenizer, job.spec.model))
        leaving.callback(engine.close)
        service = GeneratorService(job, context, engine)
        service.leaving.push(leaving.pop_all())
    service.models = {{"model": "generator"}.get(name, name): report for name, report in engine.reports.items()}
    return service


def follow(job: RLHFJob) -> None:
    """Run a non-zero rank, with its part of the model, until rank 0 stops."""
    from rlhfspec.engine import from_job

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 handles them
    with joined_by(job) as ranks:
        from_job.follow(job, ranks)
