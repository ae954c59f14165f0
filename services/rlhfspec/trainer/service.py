"""Training stage: collects a step, learns from it and publishes new weights.

Records are acknowledged once a checkpoint covers them, so a restarted trainer repeats steps bit-exactly.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rlhfspec.errors import DataExhausted, EndedEarly, PolicyCollapsed
from rlhfspec.job import RLHFJob
from rlhfspec.messages.loop import scoring_stages
from rlhfspec.messages.records import DatasetInfo, EvaluationReport, Purpose, Sample, Score, StepReport, Weights
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import Delivery, Held, Inbox, StageBus, ack_all
from rlhfspec.stage.pace import Pace
from rlhfspec.stage.vitals import Vitals, WorkerVitals
from rlhfspec.trainer.agreement import Agreement
from rlhfspec.trainer.collector import Chosen, Collector, StepShape
from rlhfspec.trainer.recorder import RunRecorder, StepTime, Trained
from rlhfspec.training.leading import Leader
from rlhfspec.training.learning.rollouts import Rollouts
from rlhfspec.training.weights import WeightStore

_LATE_SAMPLE_SECONDS = 0.5  # a sample may come after its last score


class TrainerService(Service):
    def __init__(
        self,
        worker: int,
        vitals: Vitals,
        bus: StageBus,
        *,
        job: RLHFJob,
        learner: Leader,
        weights: WeightStore,
        recorder: RunRecorder,
    ) -> None:
        super().__init__("trainer", worker, vitals)
        self.ended_early: EndedEarly | None = None
        self._bus = bus
        self._job = job
        self._learner = learner
        self._weights = weights
        self._recorder = recorder
        self._last_step = job.spec.training.steps
        self._agreement = Agreement(job.spec)
        self._stages = scoring_stages(job.spec.algorithm)
        self._deadline = job.spec.roles.trainer.deadline_seconds
        self._num_held_out = 0
        self._collectors: dict[tuple[Purpose, int], Collector] = {}  # by step
        self._held: dict[tuple[Purpose, int], list[Held]] = {}  # until a checkpoint covers it
        self._samples: Inbox[Sample]
        self._scores: Inbox[Score]
        self._saved_at = learner.version
        self._lap = _Lap(self.vitals, bus.clock)
        self._start = secrets.token_hex(4)
        self.leaving.callback(recorder.close)

    @property
    def said_at_the_end(self) -> str:
        step = self._learner.version
        return f"completed: step {step}" if self.is_done else f"left: step {step} is trained and saved"

    @property
    def is_done(self) -> bool:
        return self._learner.version >= self._last_step or isinstance(self.ended_early, PolicyCollapsed)

    async def run(self) -> None:
        await self._restore()
        self._lap.end()
        async with (
            await self._bus.subscribe(Sample) as samples,
            await self._bus.subscribe(Score) as scores,
            await self._bus.subscribe(DatasetInfo) as infos,
        ):
            self._samples, self._scores = samples, scores
            await self._publish_weights(await self._work("storing the initial weights", self._put_weights))
            if await self._hear_of_the_data(infos):
                await self._train_all()
            if self._learner.version > self._saved_at:
                await self._save()
            if self.is_done:
                await self._acknowledge_what_is_left()
        if self.is_done:
            await self._work("writing the policy", self._finish)

    async def _train_all(self) -> None:
        while await self._evaluated() and not self.is_done:
            step = self._learner.version + 1
            chosen = await self._collected(step)
            if chosen is None:
                return
            await self._train(step, chosen)

    async def _restore(self) -> None:
        state = await self._work("reading the last checkpoint", self._recorder.restore)
        if state is not None:
            await self._work("loading the checkpoint", self._learner.load_state, state)
            self._agreement.allow_for_a_restart()
        self._saved_at = self._learner.version
        self._look_for_a_collapse()

    def _look_for_a_collapse(self) -> None:
        if self._job.spec.training.stop_on_collapse and (sign := self._recorder.collapse):
            self.ended_early = PolicyCollapsed(sign)

    async def _hear_of_the_data(self, infos: Inbox[DatasetInfo]) -> bool:
        """Wait for the dataset's info; return False if stopped first."""
        while not self.stopping.is_set():
            with self.vitals.waiting("the size of the dataset"):
                arrived = await self.unless_stopped(infos.pull(max_records=1, timeout_seconds=PULL_SECONDS))
            for delivery in arrived:
                info, epochs = delivery.record, self._job.spec.dataset.epochs
                self._num_held_out = info.num_held_out
                if info.last_step and info.last_step < self._last_step:
                    self._last_step = info.last_step
                    self.ended_early = self.ended_early or DataExhausted(info.last_step, info.num_prompts, epochs or 1)
                return True
        return False

    async def _collected(self, step: int) -> Chosen | None:
        """Return the step's records, demands included, or None if stopped."""
        collector = self._collector("training", step)
        while await self._complete(collector):
            demand = collector.demand()
            if demand is None:
                return collector.chosen()
            await self._bus.publish(demand)
        return None

    async def _evaluated(self) -> bool:
        """Evaluate the current weights if due; return False if stopped first."""
        step = self._learner.version
        if not self._is_evaluation_due(step) or self._recorder.is_evaluated(step):
            return True
        began = self._bus.clock.now()
        collector = self._collector("evaluation", step)
        if not await self._complete(collector):
            return False
        seconds = self._bus.clock.now() - began
        evaluation = await self._work(f"recording {collector.shape}", self._recorder.evaluate, collector, seconds)
        self._look_for_a_collapse()
        name = self._job.metadata.name
        report = EvaluationReport(id=f"{name}/{step}/evaluation", job=name, evaluation=evaluation)
        await self._bus.publish(report)
        del self._collectors["evaluation", step]
        await self._acknowledge_what_is_saved()
        return True

    async def _complete(self, collector: Collector) -> bool:
        """Add arriving records to their steps until `collector` is complete; return False if stopped first."""
        pace = Pace(_LATE_SAMPLE_SECONDS, PULL_SECONDS)
        while not collector.is_complete:
            if self.stopping.is_set():
                return False
            with self.vitals.waiting(collector.waits_for()):
                pulling = self._scores.pull(max_records=1024, timeout_seconds=pace.seconds)
                new_scores = await self.unless_stopped(pulling)
                new_samples = await self._samples.pull(max_records=1024, timeout_seconds=0.0)
            pace.after(new_scores or new_samples)
            for sample in new_samples:
                if await self._is_wanted(sample):
                    self._collector(sample.record.purpose, sample.record.step).add_sample(sample.record)
            for score in new_scores:
                if await self._is_wanted(score):
                    self._collector(score.record.purpose, score.record.step).add_score(score.record)
        return True

    async def _is_wanted(self, delivery: Delivery[Sample] | Delivery[Score]) -> bool:
        """Hold the delivery until a checkpoint covers it, and return whether the step still needs it."""
        purpose, step = delivery.record.purpose, delivery.record.step
        if self._is_saved(purpose, step):
            await delivery.ack()
            return False
        self._held.setdefault((purpose, step), []).append(delivery.held)
        return step > self._learner.version if purpose == "training" else not self._recorder.is_evaluated(step)

    def _is_saved(self, purpose: Purpose, step: int) -> bool:
        return step <= self._saved_at and (purpose == "training" or self._recorder.is_evaluated(step))

    async def _acknowledge_what_is_saved(self) -> None:
        for purpose, step in [key for key in self._held if self._is_saved(*key)]:
            await ack_all(self._held.pop((purpose, step)))

    async def _acknowledge_what_is_left(self) -> None:
        """Acknowledge records that an earlier trainer saved but did not acknowledge."""
        for inbox in (self._samples, self._scores):
            while arrived := await inbox.pull(max_records=1024, timeout_seconds=0.0):
                await ack_all(delivery.held for delivery in arrived)

    def _collector(self, purpose: Purpose, step: int) -> Collector:
        if (purpose, step) not in self._collectors:
            self._collectors[purpose, step] = Collector(self._shape(purpose, step))
        return self._collectors[purpose, step]

    def _shape(self, purpose: Purpose, step: int) -> StepShape:
        name, spec = self._job.metadata.name, self._job.spec
        if purpose == "evaluation":
            return StepShape(
                job=name,
                step=step,
                num_prompts=self._num_held_out,
                samples_per_prompt=spec.evaluation.samples_per_prompt if spec.evaluation else 1,
                stages=("reward",),
                purpose=purpose,
            )
        return StepShape(
            job=name,
            step=step,
            num_prompts=spec.training.prompts_per_step,
            samples_per_prompt=spec.algorithm.samples_per_prompt,
            stages=self._stages,
            max_demands=spec.algorithm.max_demands if spec.algorithm.dynamic_sampling else 0,
        )

    async def _train(self, step: int, chosen: Chosen) -> None:
        rollouts = Rollouts.of(chosen.samples, chosen.scores)
        report = await self._work(f"learning from step {step}", self._learner.learn, rollouts)
        self._agreement.check(step, rollouts, report)  # before its weights are published
        weights = await self._work(f"storing weights version {step}", self._put_weights)
        trained = Trained(
            step=step,
            chosen=chosen,
            rollouts=rollouts,
            report=report,
            weights_digest=weights[-1].digest,
            time=self._lap.end(),
        )
        await self._publish_weights(weights)  # generators go on while the step is written down
        metrics = await self._work(f"recording step {step}", self._recorder.record, trained)
        del self._collectors["training", step]
        name = self._job.metadata.name
        await self._bus.publish(StepReport(id=f"{name}/{step}/report", job=name, metrics=metrics))
        if self._is_checkpoint_due(step):
            await self._save()

    def _is_checkpoint_due(self, step: int) -> bool:
        """Return whether a checkpoint is due, also for an evaluated policy, because the best may be exported."""
        due = step % self._job.spec.checkpoint.every_steps == 0 or self.is_done
        return due or self._is_evaluation_due(step)

    def _is_evaluation_due(self, step: int) -> bool:
        evaluation = self._job.spec.evaluation
        return evaluation is not None and evaluation.is_due(step, self._last_step)

    def _put_weights(self) -> list[Weights]:
        """Store the weights and return their records, critic first, because scoring this version needs it."""
        name, version = self._job.metadata.name, self._learner.version
        records = []
        if "critic" in self._stages:
            records.append(self._weights.put(name, "critic", version, self._learner.critic_state()))
        return [*records, self._weights.put(name, "policy", version, self._learner.policy_state())]

    async def _publish_weights(self, records: Sequence[Weights]) -> None:
        """Publish weights under ids of this process, so that a restarted trainer's are not dropped as duplicates."""
        for record in records:
            await self._bus.publish(replace(record, id=f"{record.id}/{self._start}"))

    async def _save(self) -> None:
        step = self._learner.version
        with self._lap.checkpoint():
            await self._work(f"writing the checkpoint of step {step}", self._checkpoint, step)
        self._saved_at = step
        await self._acknowledge_what_is_saved()

    def _checkpoint(self, step: int) -> None:
        self._recorder.checkpoint(step, self._learner.state())

    def _finish(self) -> None:
        self._recorder.finish(self._learner.version, self._learner.policy_state)

    async def _work(self, what: str, function: Any, *arguments: Any) -> Any:
        with self.vitals.working(what, deadline_seconds=self._deadline):
            return await self.in_thread(function, *arguments)


class _Lap:
    def __init__(self, vitals: WorkerVitals, clock: Clock) -> None:
        self._vitals = vitals
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._began, self._began_unix = self._clock.now(), time.time()
        self._worked = self._vitals.state().busy_seconds
        self._checkpoint_seconds = 0.0

    def end(self) -> StepTime:
        ended = StepTime(
            began_unix=self._began_unix,
            passed=self._clock.now() - self._began,
            worked=self._vitals.state().busy_seconds - self._worked,
            checkpoint=self._checkpoint_seconds,
        )
        self._begin()
        return ended

    @contextmanager
    def checkpoint(self) -> Iterator[None]:
        began = self._clock.now()
        yield
        self._checkpoint_seconds += self._clock.now() - began
