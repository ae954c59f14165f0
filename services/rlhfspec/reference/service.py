from __future__ import annotations

from collections.abc import Sequence

from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import Sample
from rlhfspec.stage.bus import StageBus
from rlhfspec.stage.scoring import TokenScoringService
from rlhfspec.stage.vitals import Vitals
from rlhfspec.training.scoring.log_probs import LogProbScorer


class ReferenceService(TokenScoringService):
    def __init__(self, worker: int, vitals: Vitals, bus: StageBus, *, job: RLHFJob, scorer: LogProbScorer) -> None:
        deadline = job.spec.roles.reference.deadline_seconds
        super().__init__("reference", worker, vitals, bus, deadline_seconds=deadline, at_once=scorer.at_once)
        self._scorer = scorer

    def score(self, samples: Sequence[Sample]) -> Sequence[Sequence[float] | Exception]:
        return self._scorer.log_probs_of([(sample.prompt_token_ids, sample.token_ids) for sample in samples])
