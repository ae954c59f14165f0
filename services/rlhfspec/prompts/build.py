from __future__ import annotations

from typing import TYPE_CHECKING

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.stage.context import Context

if TYPE_CHECKING:
    from rlhfspec.prompts.service import PromptsService


def build(job: RLHFJob, context: Context) -> PromptsService:
    from rlhfspec.prompts.service import PromptsService
    from rlhfspec.training.data import Prompts, load_rows, load_tokenizer
    from rlhfspec.training.data.rows import held_out_of

    spec = job.spec
    context.say("reading the data")
    tokenizer = load_tokenizer(spec.model)
    rows, held_out = load_rows(spec.dataset, context.run.base_folder), None
    if spec.evaluation is not None:
        rows, held_out_rows = held_out_of(rows, spec, context.run.base_folder)
        held_out = Prompts(held_out_rows, tokenizer, spec.dataset, spec.training.seed, 1)
    prompts = Prompts(rows, tokenizer, spec.dataset, spec.training.seed, spec.training.prompts_per_step)
    _check_room(job, max(prompts.longest, held_out.longest if held_out else 0))
    return PromptsService(context.worker, context.vitals, context.bus, job=job, prompts=prompts, held_out=held_out)


def _check_room(job: RLHFJob, longest: int) -> None:
    """Raise InvalidRequest if the longest prompt and response exceed the model's positions."""
    from rlhfspec.huggingface.structure.positions import num_positions

    limit, wanted = num_positions(job.spec.model.path), job.spec.generation.max_tokens
    if limit is None or longest + wanted <= limit:
        return
    room = limit - longest
    said = f"the longest prompt has {longest} tokens, and the model {limit} positions"
    if room < 1:
        raise InvalidRequest("spec.dataset.maxPromptTokens", job.spec.dataset.max_prompt_tokens, f"{said}: lower it")
    raise InvalidRequest("spec.generation.maxTokens", wanted, f"{said}: must be <= {room}")
