"""Makes one worker of the generating stage of a job."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.engines import ENGINES
from rlhfspec.stage.context import Context

if TYPE_CHECKING:
    from rlhfspec.engine.base import EngineProtocol
    from rlhfspec.generator.service import GeneratorService


def build(job: RLHFJob, context: Context) -> GeneratorService:
    from rlhfspec.engine.base import HasProcess
    from rlhfspec.generator.service import GeneratorService
    from rlhfspec.training.data import load_tokenizer

    context.say("making the engine ready, and measuring what a step costs")
    make = ENGINES[job.spec.generation.engine.name].load()
    engine: EngineProtocol = make(job, partial(load_tokenizer, job.spec.model))
    service = GeneratorService(
        context.worker,
        context.vitals,
        context.bus,
        job=job,
        engine=engine,
        weights=context.weights,
        move_endpoint=context.move_endpoint,
        hosted_scoring=context.hosted_scoring,
    )
    if isinstance(engine, HasProcess):
        service.leaving.callback(engine.close)
    service.models = {{"model": "generator"}.get(name, name): report for name, report in engine.reports.items()}
    return service
