from __future__ import annotations

from typing import TYPE_CHECKING

from rlhfspec.job import RLHFJob
from rlhfspec.stage.context import Context

if TYPE_CHECKING:
    from rlhfspec.rebalancer.service import RebalancerService


def build(job: RLHFJob, context: Context) -> RebalancerService:
    from rlhfspec.rebalancer.service import RebalancerService
    from rlhfspec.runs.folder.moves import MovesFile

    moves = MovesFile(context.run.folder)
    return RebalancerService(context.worker, context.vitals, context.bus, job=job, moves=moves)
