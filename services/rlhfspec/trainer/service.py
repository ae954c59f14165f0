"""The training stage: collect a step, learn from it, hand out new weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlhfspec.job import RLHFJob
from rlhfspec.learning.algorithms import scoring_stages
from rlhfspec.learning.learner import LearnReport
from rlhfspec.learning.rollouts import Rollouts
from rlhfspec.records import Sample, Score, StepReport, Weights
from rlhfspec.service.base import Service
from rlhfspec.service.bus import Delivery, Inbox, StageBus, kept_in_progress
from rlhfspec.service.vitals import Vitals
from rlhfspec.trainer.collector import Chosen, Collector, StepShape
from rlhfspec.weights import WeightStore

PULL_SECONDS = 0.5
ACK_WAIT_SECONDS = 60.0
MOST_HELD = 1 << 20  # records of the steps that are collected


class Learns(Protocol):
    """What the trainer needs of `rlhfspec.learning.learner.Learner` (or of a leader of several ranks)."""

    @property
    def version(self) -> int: ...
    def learn(self, rollouts: Rollouts) -> LearnReport: ...
    def policy_state(self) -> dict[str, Any]: ...
    def critic_state(self) -> dict[str, Any]: ...
    def state(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """One step, as it was trained."""

    step: int
    chosen: Chosen
    rollouts: Rollouts
    report: LearnReport
    weights_digest: str


class Recorder(Protocol):
    """Where a step's results and checkpoints go. Called from the trainer's thread, in the order of the steps."""

    def learnt(self) -> None:
        """The step is learnt and nobody samples under its weights yet: what is measured from now on is the next's."""
        ...

    def record(self, trained: Trained) -> str:
        """Writes the step's lines; returns that of `steps.jsonl`."""
        ...

    def checkpoint(self, step: int, state: dict[str, Any]) -> None: ...


class TrainerService(Service):
    """Consumes Sample, Score; produces Weights, Demand, StepReport; waits for every sample of the step and every score
    of a sample; unblocked by generator, reward, reference, critic."""

    def __init__(
        self,
        worker: int,
        vitals: Vitals,
        bus: StageBus,
        *,
        job: RLHFJob,
        learner: Learns,
        weights: WeightStore,
        recorder: Recorder,
        last_step: int,
    ) -> None:
        super().__init__("trainer", worker, vitals)
        self._bus = bus
        self._job = job
        self._learner = learner
        self._weights = weights
        self._recorder = recorder
        self._last_step = last_step
        self._stages = scoring_stages(job.spec.algorithm)
        self._deadline = job.spec.roles.trainer.deadline_seconds
        self._collectors: dict[int, Collector] = {}
        self._held: dict[int, list[Delivery[Sample] | Delivery[Score]]] = {}
        self._saved_at = learner.version  # what was begun from needs no checkpoint

    async def run(self) -> None:
        samples = await self._bus.subscribe(Sample, ack_wait_seconds=ACK_WAIT_SECONDS, max_unacknowledged=MOST_HELD)
        scores = await self._bus.subscribe(Score, ack_wait_seconds=ACK_WAIT_SECONDS, max_unacknowledged=MOST_HELD)
        await self._publish_weights(await self._work("weights to begin with", self._put_weights))
        async with kept_in_progress(self._all_held, every_seconds=ACK_WAIT_SECONDS / 4, clock=self._bus.clock):
            while self._learner.version < self._last_step:
                step = self._learner.version + 1
                chosen = await self._collect(step, samples, scores)
                if chosen is None:  # asked to stop
                    break
                await self._train(step, chosen)
        if self._learner.version > self._saved_at:
            await self._save()

    def _all_held(self) -> list[Delivery[Sample] | Delivery[Score]]:
        """Acknowledged when their step is trained, which may be hours from now."""
        return [delivery for deliveries in self._held.values() for delivery in deliveries]

    async def _collect(self, step: int, samples: Inbox[Sample], scores: Inbox[Score]) -> Chosen | None:
        """Everything the step needs, however long its demands take; None when the run is to stop."""
        collector = self._collector(step)
        while not self.stopping.is_set():
            if collector.is_complete:
                demand = collector.demand()
                if demand is None:
                    return collector.chosen()
                await self._bus.publish(demand)
            with self.vitals.waiting(collector.waits_for()):
                pulling = scores.pull(max_records=1024, timeout_seconds=PULL_SECONDS)
                new_scores = await self.unless_stopped(pulling)
                new_samples = await samples.pull(max_records=1024, timeout_seconds=0.0)
            for sample in new_samples:
                if await self._is_wanted(sample):
                    self._collector(sample.record.step).add_sample(sample.record)
            for score in new_scores:
                if await self._is_wanted(score):
                    self._collector(score.record.step).add_score(score.record)
        return None

    async def _is_wanted(self, delivery: Delivery[Sample] | Delivery[Score]) -> bool:
        """Held until its step is trained. What comes again after that is only acknowledged."""
        step = delivery.record.step
        if step <= self._learner.version:
            await delivery.ack()
            return False
        self._held.setdefault(step, []).append(delivery)
        return True

    def _collector(self, step: int) -> Collector:
        if step not in self._collectors:
            algorithm = self._job.spec.algorithm
            shape = StepShape(
                job=self._job.metadata.name,
                step=step,
                num_prompts=self._job.spec.training.prompts_per_step,
                samples_per_prompt=algorithm.samples_per_prompt,
                stages=self._stages,
                max_demands=algorithm.max_demands if algorithm.dynamic_sampling else 0,
            )
            self._collectors[step] = Collector(shape)
        return self._collectors[step]

    async def _train(self, step: int, chosen: Chosen) -> None:
        rollouts = Rollouts.of(chosen.samples, chosen.scores)
        report = await self._work(f"learning from step {step}", self._learner.learn, rollouts)
        weights = await self._work(f"handing out weights version {step}", self._put_weights)
        self._recorder.learnt()
        await self._publish_weights(weights)  # generators go on while the step is written down
        trained = Trained(step=step, chosen=chosen, rollouts=rollouts, report=report, weights_digest=weights[-1].digest)
        line = await self._work(f"writing down step {step}", self._recorder.record, trained)
        if step % self._job.spec.checkpoint.every_steps == 0 or step == self._last_step:
            await self._save()
        await self._publish_report(trained, line)
        for delivery in self._held.pop(step, []):
            await delivery.ack()
        del self._collectors[step]

    def _put_weights(self) -> list[Weights]:
        """The critic first: when a sample of this version comes to be scored, the critic's version is there."""
        name, version = self._job.metadata.name, self._learner.version
        records = []
        if "critic" in self._stages:
            records.append(self._weights.put(name, "critic", version, self._learner.critic_state()))
        return [*records, self._weights.put(name, "policy", version, self._learner.policy_state())]

    async def _publish_weights(self, records: Sequence[Weights]) -> None:
        for record in records:
            await self._bus.publish(record)

    async def _publish_report(self, trained: Trained, line: str) -> None:
        name = self._job.metadata.name
        await self._bus.publish(
            StepReport(
                id=f"{name}/{trained.step}/report",
                job=name,
                step=trained.step,
                weights_version=trained.report.version,
                weights_digest=trained.weights_digest,
                metrics_json=line,
            )
        )

    async def _save(self) -> None:
        step = self._learner.version
        await self._work(f"writing the checkpoint of step {step}", self._checkpoint, step)
        self._saved_at = step

    def _checkpoint(self, step: int) -> None:
        self._recorder.checkpoint(step, self._learner.state())

    async def _work(self, what: str, function: Any, *arguments: Any) -> Any:
        with self.vitals.working(what, deadline_seconds=self._deadline):
            return await self.in_thread(function, *arguments)
