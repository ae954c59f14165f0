from __future__ import annotations

from typing import TYPE_CHECKING

from rlhfspec.job import RLHFJob
from rlhfspec.job.rewards import ModelSource
from rlhfspec.stage.context import Context

if TYPE_CHECKING:
    from rlhfspec.reward.service import RewardService


def build(job: RLHFJob, context: Context) -> RewardService:
    from rlhfspec.reward.service import RewardService
    from rlhfspec.training.scoring.rewards.sources import RewardSources

    sources = RewardSources(
        job.spec.rewards, context.run.base_folder, device=_device(job), keep_prompts=job.spec.algorithm.shares_prompts
    )
    return RewardService(context.worker, context.vitals, context.bus, job=job, sources=sources)


def _device(job: RLHFJob) -> str:
    """Return the device of reward models. Without any, torch is not imported."""
    if not any(isinstance(source, ModelSource) for source in job.spec.rewards.sources):
        return "cpu"
    from rlhfspec.huggingface.devices import device_of

    return device_of(job.spec)
