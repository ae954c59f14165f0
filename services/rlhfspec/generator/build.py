"""Makes one worker of the generating stage of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhfspec.choices.drafters import may_run_draft_model
from rlhfspec.job import RLHFJob
from rlhfspec.service.context import Context

if TYPE_CHECKING:
    from rlhfspec.generator.service import GeneratorService


def build(job: RLHFJob, context: Context) -> GeneratorService:
    from rlhfspec.data import load_tokenizer
    from rlhfspec.engine.config import EngineConfig
    from rlhfspec.engine.loading import make_engine
    from rlhfspec.generator.service import GeneratorService
    from rlhfspec.huggingface.devices import device_of
    from rlhfspec.huggingface.loading import load_model
    from rlhfspec.huggingface.positions import max_context

    model, generation = job.spec.model, job.spec.generation
    context.say("making the engine ready, and measuring what a step costs")
    config = EngineConfig(
        dtype=generation.dtype,
        device=device_of(job.spec),
        speculation=generation.speculation.mode,
        max_sequences=min(generation.max_sequences, job.spec.samples_in_flight),
        max_context=max_context(job),
        kv_cache_tokens=generation.kv_cache_tokens,
    )
    target = load_model(model.path, field="spec.model.path")
    draft = None
    if may_run_draft_model(generation.speculation.mode) and model.drafter is not None:
        draft = load_model(model.drafter, field="spec.model.drafter")
    engine = make_engine(target, config, draft=draft, tokenizer=load_tokenizer(model))
    service = GeneratorService(
        context.worker,
        context.vitals,
        context.bus,
        job=job,
        engine=engine,
        weights=context.weights,
        ends=context.ends,
        guest=context.guest,
    )
    service.models = {{"model": "generator"}.get(name, name): report for name, report in engine.reports.items()}
    return service
