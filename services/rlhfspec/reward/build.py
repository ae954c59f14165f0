"""Makes one worker of the rewarding stage of a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhfspec.job import RLHFJob
from rlhfspec.stage.context import Context

if TYPE_CHECKING:
    from rlhfspec.reward.service import RewardService


def build(job: RLHFJob, context: Context) -> RewardService:
    from rlhfspec.reward.service import RewardService
    from rlhfspec.training.scoring.rewards.sources import RewardSources

    shared = job.spec.algorithm.shares_prompts
    sources = RewardSources(job.spec.rewards, context.run.base_folder, keep_prompts=shared)
    return RewardService(context.worker, context.vitals, context.bus, job=job, sources=sources)
