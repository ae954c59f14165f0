"""Base of reference and critic, which score the tokens of samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from rlhfspec.messages.records import Sample, Score, ScoringStage
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import Delivery, StageBus, give_back
from rlhfspec.stage.logs import about
from rlhfspec.stage.vitals import Vitals

_MOST_TOKENS = 1 << 15  # of samples scored together: half a second of an 8B model on a GPU


class TokenScoringService(Service):
    """Service whose scores depend on the sample alone, not on worker, time or batch.

    Consumes Sample; produces Score; waits for finished samples; unblocked by generator.
    """

    def __init__(
        self,
        stage: ScoringStage,
        worker: int,
        vitals: Vitals,
        bus: StageBus,
        *,
        deadline_seconds: float,
        at_once: int = 1,
    ) -> None:
        super().__init__(stage, worker, vitals)
        self._scoring_stage = stage
        self._bus = bus
        self._deadline = deadline_seconds
        self._at_once = at_once

    @abstractmethod
    def score(self, samples: Sequence[Sample]) -> Sequence[Sequence[float] | Exception]:
        """Return each sample's values per response token, or its error; runs in the worker's thread."""

    async def prepare(self, sample: Sample) -> bool:
        """Wait until samples of this step can be scored; return False at a stop."""
        return True

    @property
    def weights_version(self) -> int:
        return 0

    async def run(self) -> None:
        async with await self._bus.subscribe(Sample) as inbox:
            while not self.stopping.is_set():
                with self.vitals.waiting("finished samples"):
                    pulling = inbox.pull(max_records=self._at_once, timeout_seconds=PULL_SECONDS)
                    arrived = await self.unless_stopped(pulling)
                await self._score_all([each for each in arrived if not await self._is_passed_over(each)])

    async def _is_passed_over(self, delivery: Delivery[Sample]) -> bool:
        sample = delivery.record
        if sample.purpose == "training" and sample.finish_reason != "error":
            return False
        await delivery.ack()  # no score is awaited
        return True

    async def _score_all(self, arrived: list[Delivery[Sample]]) -> None:
        while arrived:
            count = _num_together(arrived)
            if not await self.prepare(arrived[0].record):
                break
            await self._score(arrived[:count])
            arrived = arrived[count:]
            if self.stopping.is_set():
                break
        await give_back([each.held for each in arrived])  # so that another worker gets them at once

    async def _score(self, together: Sequence[Delivery[Sample]]) -> None:
        samples = [delivery.record for delivery in together]
        others = f" and {len(samples) - 1} more" if len(samples) > 1 else ""
        doing = self.vitals.working(f"scoring {samples[0].id}{others}", deadline_seconds=self._deadline)
        with about(samples[0].id), doing as worked:
            scored = await self.in_thread(self.score, samples)
        problems = []
        for delivery, values in zip(together, scored, strict=True):
            if isinstance(values, Exception):
                problems.append(values)
                continue
            await self._bus.publish(self._as_score(delivery.record, values, worked.seconds / len(samples)))
            await delivery.ack()
        if problems:  # after the others are published, so that they are not scored again
            raise problems[0]

    def _as_score(self, sample: Sample, values: Sequence[float], seconds: float) -> Score:
        return Score(
            id=f"{sample.id}/{self.stage}",
            sample_id=sample.id,
            job=sample.job,
            step=sample.step,
            stage=self._scoring_stage,
            values=tuple(values),
            weights_version=self.weights_version,
            seconds=seconds,
        )


def _num_together(deliveries: Sequence[Delivery[Sample]]) -> int:
    """Return how many leading deliveries to score as one batch: of one step, redelivered ones alone."""
    first, num_tokens = deliveries[0], 0
    for place, each in enumerate(deliveries):
        num_tokens += len(each.record.prompt_token_ids) + len(each.record.token_ids)
        is_first_time = max(first.num_deliveries, each.num_deliveries) == 1  # else it may kill the worker
        is_with_it = each.record.step == first.record.step and is_first_time and num_tokens <= _MOST_TOKENS
        if place and not is_with_it:
            return place
    return len(deliveries)
