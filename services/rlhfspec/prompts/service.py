"""The first stage: which prompts a step takes, published as soon as its weights may sample them."""

from __future__ import annotations

from rlhfspec.data import Prompts
from rlhfspec.job import RLHFJob
from rlhfspec.records import Demand, Prompt, Weights, sample_id, sample_seed
from rlhfspec.service.base import Service
from rlhfspec.service.bus import Inbox, StageBus
from rlhfspec.service.tasks import together
from rlhfspec.service.vitals import Vitals

PULL_SECONDS = 0.5


class PromptsService(Service):
    """Consumes Weights, Demand; produces Prompt; waits for a weights version not older than the step allows;
    unblocked by trainer."""

    def __init__(
        self, worker: int, vitals: Vitals, bus: StageBus, *, job: RLHFJob, prompts: Prompts, last_step: int
    ) -> None:
        super().__init__("prompts", worker, vitals)
        self._bus = bus
        self._job = job
        self._prompts = prompts
        self._last_step = last_step
        self._published = 0  # the last step whose prompts are out; 0: none since this worker began

    async def run(self) -> None:
        weights = await self._bus.subscribe(Weights)
        demands = await self._bus.subscribe(Demand)
        await together(self._follow(weights), self._answer(demands))

    async def _follow(self, weights: Inbox[Weights]) -> None:
        while not self.stopping.is_set():
            with self.vitals.waiting(f"weights for step {self._published + 1}"):
                arrived = await self.unless_stopped(weights.pull(max_records=8, timeout_seconds=PULL_SECONDS))
            for delivery in arrived:
                if delivery.record.role == "policy":
                    await self._publish_steps(delivery.record.version)
                await delivery.ack()

    async def _answer(self, demands: Inbox[Demand]) -> None:
        while not self.stopping.is_set():
            with self.vitals.waiting("a demand"):
                arrived = await self.unless_stopped(demands.pull(max_records=8, timeout_seconds=PULL_SECONDS))
            for delivery in arrived:
                demand = delivery.record
                await self._publish(demand.step, demand.round, demand.num_prompts)
                await delivery.ack()

    async def _publish_steps(self, version: int) -> None:
        """Every step that version may sample: the next one, and as many more as staleness allows."""
        newest = min(version + 1 + self._job.spec.training.max_staleness, self._last_step)
        for step in range(max(self._published, version) + 1, newest + 1):
            await self._publish(step)
            self._published = step

    async def _publish(self, step: int, round: int = 0, count: int | None = None) -> None:
        with self.vitals.working(f"prompts of step {step}", deadline_seconds=self._deadline):
            for prompt in await self.in_thread(prompts_of, self._job, self._prompts, step, round, count):
                await self._bus.publish(prompt)

    @property
    def _deadline(self) -> float:
        return self._job.spec.roles.prompts.deadline_seconds


def prompts_of(job: RLHFJob, prompts: Prompts, step: int, round: int, count: int | None) -> list[Prompt]:
    """Pure: the records of a step, or of one of its demands. The replicas of a prompt stand together."""
    training, name = job.spec.training, job.metadata.name
    records = []
    for place, row in prompts.take(step, round, count):
        for replica in range(job.spec.algorithm.samples_per_prompt):
            record_id = sample_id(name, step=step, prompt=place, replica=replica)
            records.append(
                Prompt(
                    id=record_id,
                    job=name,
                    step=step,
                    prompt=place,
                    replica=replica,
                    text=row.text,
                    token_ids=row.token_ids,
                    columns_json=row.columns_json,
                    seed=sample_seed(training.seed, record_id),
                    weights_version=max(step - 1 - training.max_staleness, 0),
                )
            )
    return records
