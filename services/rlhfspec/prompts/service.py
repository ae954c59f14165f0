from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhfspec.job import HeldOut, RLHFJob
from rlhfspec.messages.records import (
    DatasetInfo,
    Demand,
    Prompt,
    Sample,
    Weights,
    evaluation_id,
    sample_id,
    sample_seed,
)
from rlhfspec.prompts.lengths import PromptLengths
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import Inbox, StageBus
from rlhfspec.stage.tasks import together
from rlhfspec.stage.vitals import Vitals
from rlhfspec.training.data import PromptRow, Prompts


class PromptsService(Service):
    """Prompts worker. Prompts are published once weights may sample them, longest work first."""

    def __init__(
        self,
        worker: int,
        vitals: Vitals,
        bus: StageBus,
        *,
        job: RLHFJob,
        prompts: Prompts,
        held_out: Prompts | None = None,
    ) -> None:
        super().__init__("prompts", worker, vitals)
        self.prompts = prompts
        self.held_out = held_out  # where the job evaluates
        self._bus = bus
        self._job = job
        self._evaluation = job.spec.evaluation or HeldOut()
        self._last_step = min(job.spec.training.steps, prompts.order.last_step or job.spec.training.steps)
        self._lengths = PromptLengths()
        self._published = 0  # last published step; 0: none yet

    async def run(self) -> None:
        name = self._job.metadata.name
        info = DatasetInfo(
            id=f"{name}/dataset",
            job=name,
            num_prompts=len(self.prompts),
            num_held_out=min(len(self.held_out), self._evaluation.num_prompts) if self.held_out else 0,
            last_step=self.prompts.order.last_step or 0,
            columns=self.prompts.columns,
        )
        async with await self._bus.subscribe(Weights) as weights, await self._bus.subscribe(Demand) as demands:
            await self._bus.publish(info)
            await together(self._follow(weights), self._answer(demands), self._learn_lengths())

    async def _learn_lengths(self) -> None:
        num_asked = self._last_step * self._job.spec.training.prompts_per_step
        if self.held_out is None and num_asked <= len(self.prompts):
            return  # no prompt repeats
        async with await self._bus.subscribe(Sample) as samples:
            while not self.stopping.is_set():
                arrived = await self.unless_stopped(samples.pull(max_records=256, timeout_seconds=PULL_SECONDS))
                for delivery in arrived:
                    self._lengths.add(delivery.record)

    async def _follow(self, weights: Inbox[Weights]) -> None:
        while not self.stopping.is_set():
            with self.vitals.waiting(f"weights for step {self._published + 1}"):
                arrived = await self.unless_stopped(weights.pull(max_records=8, timeout_seconds=PULL_SECONDS))
            for delivery in arrived:
                if delivery.record.role == "policy":
                    await self._publish_steps(delivery.record.version)

    async def _answer(self, demands: Inbox[Demand]) -> None:
        while not self.stopping.is_set():
            with self.vitals.waiting("a demand"):
                arrived = await self.unless_stopped(demands.pull(max_records=8, timeout_seconds=PULL_SECONDS))
            for delivery in arrived:
                demand = delivery.record
                asked = (demand.step, demand.round, demand.num_prompts)
                await self._publish(f"step {demand.step}", prompts_of, self.prompts, *asked)
                await delivery.ack()

    async def _publish_steps(self, version: int) -> None:
        """Publish the prompts of every step that this version may sample within the allowed staleness."""
        if self.held_out and self._evaluation.is_due(version, self._last_step):
            await self._publish(f"the evaluation after step {version}", evaluation_prompts, self.held_out, version)
        newest = min(version + 1 + self._job.spec.training.max_staleness, self._last_step)
        for step in range(max(self._published, version) + 1, newest + 1):
            await self._publish(f"step {step}", prompts_of, self.prompts, step, 0, None)
            self._published = step

    async def _publish(self, what: str, make: Callable[..., list[Prompt]], *arguments: object) -> None:
        deadline = self._job.spec.roles.prompts.deadline_seconds
        with self.vitals.working(f"choosing the prompts of {what}", deadline_seconds=deadline):
            for prompt in self._lengths.longest_first(await self.in_thread(make, self._job, *arguments)):
                await self._bus.publish(prompt)


def prompts_of(job: RLHFJob, prompts: Prompts, step: int, round: int, count: int | None) -> list[Prompt]:
    """Return the prompts of a step (`round` 0) or of its demand `round` for `count` prompts, replicas adjacent."""
    name, training = job.metadata.name, job.spec.training
    version = max(step - 1 - training.max_staleness, 0)
    ids = [
        (place, replica, row, sample_id(name, step=step, prompt=place, replica=replica))
        for place, row in prompts.take(step, round, count)
        for replica in range(job.spec.algorithm.samples_per_prompt)
    ]
    return [
        _prompt(job, row, id=id, step=step, prompt=place, replica=replica, seed_of=id, weights_version=version)
        for place, replica, row, id in ids
    ]


def evaluation_prompts(job: RLHFJob, held_out: Prompts, step: int) -> list[Prompt]:
    """Return the held-out prompts for the policy after `step`, always with the same seeds."""
    name, evaluation = job.metadata.name, job.spec.evaluation
    assert evaluation is not None, "an evaluation is asked for where the job has one"
    return [
        _prompt(
            job,
            held_out[place],
            id=evaluation_id(name, step=step, prompt=place, replica=replica),
            step=step,
            prompt=place,
            replica=replica,
            seed_of=f"{name}/evaluation/{place}/{replica}",
            weights_version=step,
            purpose="evaluation",
        )
        for place in range(min(evaluation.num_prompts, len(held_out)))
        for replica in range(evaluation.samples_per_prompt)
    ]


def _prompt(job: RLHFJob, row: PromptRow, *, seed_of: str, **fields: Any) -> Prompt:
    return Prompt(
        job=job.metadata.name,
        text=row.text,
        token_ids=row.token_ids,
        columns_json=row.columns_json,
        seed=sample_seed(job.spec.training.seed, seed_of),
        **fields,
    )
