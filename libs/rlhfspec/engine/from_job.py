"""The engine `own` of `rlhfspec.job.choices.engines`, built from a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine, make_engine
from rlhfspec.engine.forward.models import follow_engine, load_drafter
from rlhfspec.huggingface.cutting import load_part
from rlhfspec.huggingface.devices import device_of, settled
from rlhfspec.huggingface.loading import load_stored
from rlhfspec.huggingface.structure.positions import max_context
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.drafters import MADE_OF_THE_POLICY, may_run_draft_model

_MODEL_FIELD = "spec.model.path"


def make(job: RLHFJob, load_tokenizer: Callable[[], Any], group: Ranks | None = None) -> Engine:
    """Build the engine of a job. `group`: the ranks of this generator, of which this is rank 0."""
    model = job.spec.model
    target = _target(job, group)
    draft: Any = model.drafter if may_run_draft_model(job.spec.generation.speculation.mode) else None
    if draft not in (None, *MADE_OF_THE_POLICY):
        draft = load_drafter(draft, target, field="spec.model.drafter")
    return make_engine(target, _config(job), draft=draft, tokenizer=load_tokenizer(), group=group)


def follow(job: RLHFJob, group: Ranks) -> None:
    """Run rank 0's commands on this rank's part of the model until it stops."""
    follow_engine(_target(job, group), _config(job), group)


def _target(job: RLHFJob, group: Ranks | None) -> Any:
    path = job.spec.model.path
    return load_stored(path, field=_MODEL_FIELD) if group is None else load_part(path, group, field=_MODEL_FIELD)


def _config(job: RLHFJob) -> EngineConfig:
    device = device_of(job.spec)
    generation = settled(job.spec, device).generation
    speculation, target = generation.speculation, job.spec.serving.target_tpot_milliseconds
    return EngineConfig(
        dtype=generation.dtype,
        device=device,
        exact=generation.exact,
        speculation=speculation.mode,
        learning=speculation.learning_share if speculation.learning == "share" else speculation.learning,
        max_sequences=min(generation.max_sequences, job.spec.samples_in_flight),
        max_context=max_context(job),
        kv_cache_tokens=generation.kv_cache_tokens,
        gpu_memory_fraction=generation.gpu_memory_fraction,
        target_tpot=target and target / 1e3,
    )
