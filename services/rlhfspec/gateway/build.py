from __future__ import annotations

from typing import TYPE_CHECKING

from rlhfspec.job import RLHFJob
from rlhfspec.stage.context import GatewayContext

if TYPE_CHECKING:
    from rlhfspec.gateway.service import GatewayService


def build(job: RLHFJob, context: GatewayContext) -> GatewayService:
    from rlhfspec.gateway.service import GatewayService
    from rlhfspec.training.data import load_tokenizer

    context.say("loading the tokenizer")
    return GatewayService(job, context, load_tokenizer(job.spec.model))
