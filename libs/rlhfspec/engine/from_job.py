"""The engine `own` of `rlhfspec.job.choices.engines`, as a job describes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine
from rlhfspec.engine.loading import make_engine
from rlhfspec.huggingface.devices import device_of
from rlhfspec.huggingface.loading import load_model
from rlhfspec.huggingface.structure.positions import max_context
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.drafters import AUTO, may_run_draft_model


def make(job: RLHFJob, load_tokenizer: Callable[[], Any]) -> Engine:
    model, generation = job.spec.model, job.spec.generation
    config = EngineConfig(
        dtype=generation.dtype,
        device=device_of(job.spec),
        speculation=generation.speculation.mode,
        learning=generation.speculation.learning,
        max_sequences=min(generation.max_sequences, job.spec.samples_in_flight),
        max_context=max_context(job),
        kv_cache_tokens=generation.kv_cache_tokens,
        gpu_memory_fraction=generation.gpu_memory_fraction,
    )
    target = load_model(model.path, field="spec.model.path")
    draft = None
    if may_run_draft_model(generation.speculation.mode) and model.drafter is not None:
        draft = model.drafter if model.drafter == AUTO else load_model(model.drafter, field="spec.model.drafter")
    return make_engine(target, config, draft=draft, tokenizer=load_tokenizer())
