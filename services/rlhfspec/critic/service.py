from __future__ import annotations

from collections.abc import Sequence

from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import Sample, Weights
from rlhfspec.stage.base import PULL_SECONDS
from rlhfspec.stage.bus import Inbox, StageBus
from rlhfspec.stage.new_weights import load_newest
from rlhfspec.stage.scoring import TokenScoringService
from rlhfspec.stage.vitals import Vitals
from rlhfspec.training.scoring.values import ValueScorer
from rlhfspec.training.weights import WeightStore


class CriticService(TokenScoringService):
    def __init__(
        self, worker: int, vitals: Vitals, bus: StageBus, *, job: RLHFJob, scorer: ValueScorer, weights: WeightStore
    ) -> None:
        deadline = job.spec.roles.critic.deadline_seconds
        super().__init__("critic", worker, vitals, bus, deadline_seconds=deadline, at_once=scorer.at_once)
        self._staleness = job.spec.training.max_staleness
        self._scorer = scorer
        self._weights = weights
        self._inbox: Inbox[Weights] | None = None

    @property
    def weights_version(self) -> int:
        return self._scorer.version

    async def prepare(self, sample: Sample) -> bool:
        """Wait for the critic weights of the sample's step, published before the policy's; return False if stopped."""
        self._inbox = self._inbox or await self._bus.subscribe(Weights)
        wanted = sample.step - 1 - self._staleness
        while not self.stopping.is_set():
            late = self.weights_version < wanted
            with self.vitals.waiting(f"the critic's weights, version {wanted}"):
                pulling = self._inbox.pull(max_records=1024, timeout_seconds=PULL_SECONDS if late else 0.0)
                arrived = await self.unless_stopped(pulling)
            await self._take([delivery.record for delivery in arrived if delivery.record.role == "critic"])
            if not arrived and self.weights_version >= wanted:
                return True
        return False

    async def _take(self, records: list[Weights]) -> None:
        if newer := [record for record in records if record.version > self.weights_version]:
            load = self._scorer.load_weights
            await load_newest(self, self._weights, newer, load, deadline_seconds=self._deadline, clock=self._bus.clock)

    def score(self, samples: Sequence[Sample]) -> Sequence[Sequence[float] | Exception]:
        return self._scorer.values_of([(sample.prompt_token_ids, sample.token_ids) for sample in samples])
