"""What reference and critic have in common: one sample after the other, a number for each of its tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from rlhfspec.messages.records import Sample, Score, ScoringStage
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import StageBus
from rlhfspec.stage.logs import about
from rlhfspec.stage.vitals import Vitals


class TokenScoringService(Service):
    """Consumes Sample; produces Score; waits for finished samples; unblocked by generator.

    A score is a function of its sample alone: which worker makes it, when and with what else, leaves no trace.
    """

    def __init__(
        self, stage: ScoringStage, worker: int, vitals: Vitals, bus: StageBus, *, deadline_seconds: float
    ) -> None:
        super().__init__(stage, worker, vitals)
        self._scoring_stage = stage
        self._bus = bus
        self._deadline = deadline_seconds

    @abstractmethod
    def score(self, sample: Sample) -> Sequence[float]:
        """A number for each response token; runs in the worker's thread."""

    async def prepare(self, sample: Sample) -> bool:
        """Waits for whatever must be there before this sample can be scored; False: asked to stop before it was."""
        return True

    @property
    def weights_version(self) -> int:
        return 0

    async def run(self) -> None:
        async with await self._bus.subscribe(Sample) as inbox:
            while not self.stopping.is_set():
                with self.vitals.waiting("finished samples"):
                    arrived = await self.unless_stopped(inbox.pull(max_records=1, timeout_seconds=PULL_SECONDS))
                for delivery in arrived:
                    sample = delivery.record
                    if sample.purpose == "training" and sample.finish_reason != "error":  # else no score is awaited
                        if not await self.prepare(sample):
                            return await delivery.nak()  # another worker gets it at once
                        await self._score(sample)
                    await delivery.ack()

    async def _score(self, sample: Sample) -> None:
        doing = self.vitals.working(f"scoring {sample.id}", deadline_seconds=self._deadline)
        with about(sample.id), doing as worked:
            values = await self.in_thread(self.score, sample)
        await self._bus.publish(
            Score(
                id=f"{sample.id}/{self.stage}",
                sample_id=sample.id,
                job=sample.job,
                step=sample.step,
                stage=self._scoring_stage,
                values=tuple(values),
                weights_version=self.weights_version,
                seconds=worked.seconds,
            )
        )
