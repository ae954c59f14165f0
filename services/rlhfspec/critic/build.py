from __future__ import annotations

from typing import TYPE_CHECKING

from rlhfspec.job import RLHFJob
from rlhfspec.stage.context import Context

if TYPE_CHECKING:
    from rlhfspec.critic.service import CriticService


def build(job: RLHFJob, context: Context) -> CriticService:
    """Return a critic worker. Its weights come with the first published version."""
    from rlhfspec.critic.service import CriticService
    from rlhfspec.huggingface.devices import device_of
    from rlhfspec.huggingface.structure.positions import max_context
    from rlhfspec.training.modeling.critic import load_critic
    from rlhfspec.training.scoring.values import ValueScorer

    context.say("loading the critic")
    most = max_context(job)
    critic = load_critic(job.spec.model, max_context=most)
    scorer = ValueScorer(
        critic, max_context=most, device=device_of(job.spec), keep_prompts=job.spec.algorithm.shares_prompts
    )
    service = CriticService(
        context.worker, context.vitals, context.bus, job=job, scorer=scorer, weights=context.weights
    )
    service.models = {"critic": scorer.report}
    return service
