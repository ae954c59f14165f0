"""The rewarding stage: samples in, rewards out, as many at a time as the sources allow."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from rlhfspec.job import RLHFJob
from rlhfspec.records import Sample
from rlhfspec.scoring.rewards.sources import RewardSources
from rlhfspec.service.base import Service
from rlhfspec.service.bus import Delivery, StageBus
from rlhfspec.service.vitals import Vitals

PULL_SECONDS = 0.5


class RewardService(Service):
    """Consumes Sample; produces Score; waits for finished samples; unblocked by generator."""

    def __init__(self, worker: int, vitals: Vitals, bus: StageBus, *, job: RLHFJob, sources: RewardSources) -> None:
        super().__init__("reward", worker, vitals)
        self._bus = bus
        self._sources = sources
        self._deadline = job.spec.roles.reward.deadline_seconds
        self._group_size = job.spec.algorithm.samples_per_prompt if sources.grouping == "group" else 1
        self._groups: defaultdict[str, dict[str, Delivery[Sample]]] = defaultdict(dict)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        inbox = await self._bus.subscribe(Sample, ack_wait_seconds=self._deadline, max_unacknowledged=1 << 16)
        with self.vitals.working("making the reward sources ready", deadline_seconds=self._deadline):
            await self._sources.start()
        try:
            while not self.stopping.is_set():
                with self.vitals.waiting("finished samples"):
                    for delivery in await inbox.pull(max_records=256, timeout_seconds=PULL_SECONDS):
                        self._collect(delivery)
                self._raise_failure()
        finally:
            await self._end_tasks()
            await self._sources.close()

    def _collect(self, delivery: Delivery[Sample]) -> None:
        sample = delivery.record
        key = sample.group_id if self._group_size > 1 else sample.id
        self._groups[key][sample.id] = delivery
        if len(self._groups[key]) == self._group_size:
            self._tasks.add(asyncio.create_task(self._score(list(self._groups.pop(key).values()))))

    async def _score(self, deliveries: list[Delivery[Sample]]) -> None:
        samples = [delivery.record for delivery in deliveries]
        with self.vitals.working(f"reward of {samples[0].id}", deadline_seconds=self._deadline):
            for score in await self._sources.score_many(samples):
                await self._bus.publish(score)
        for delivery in deliveries:
            await delivery.ack()

    def _raise_failure(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
