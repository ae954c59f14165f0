from __future__ import annotations

from typing import TYPE_CHECKING

from rlhfspec.job import RLHFJob, Spec
from rlhfspec.stage.context import Context

if TYPE_CHECKING:
    from rlhfspec.reference.service import ReferenceService


def build(job: RLHFJob, context: Context) -> ReferenceService:
    from rlhfspec.huggingface.devices import device_of, settled
    from rlhfspec.huggingface.structure.positions import max_context
    from rlhfspec.reference.service import ReferenceService
    from rlhfspec.training.modeling.loading import load_reference
    from rlhfspec.training.scoring.log_probs import LogProbScorer

    context.say("loading the reference")
    most, device = max_context(job), device_of(job.spec)
    scorer = LogProbScorer(
        load_reference(job.spec.model, max_context=most, stored=device != "cpu"),
        temperature=job.spec.generation.temperature,
        max_context=most,
        dtype=_dtype(settled(job.spec, device)),
        device=device,
        keep_prompts=job.spec.algorithm.shares_prompts,
    )
    service = ReferenceService(context.worker, context.vitals, context.bus, job=job, scorer=scorer)
    service.models = {"reference": scorer.report}
    return service


def _dtype(spec: Spec) -> str:
    """Return the trainer's dtype, so that the KL contains no rounding difference."""
    if spec.training.autocast == "bfloat16":
        return "bfloat16"
    return spec.generation.dtype if spec.training.exact_on_policy else spec.model.dtype
