"""The rewarding stage: samples in, rewards out, as many at a time as the sources allow."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from rlhfspec.job import RLHFJob
from rlhfspec.records import Sample
from rlhfspec.scoring.rewards.sources import RewardSources
from rlhfspec.service.base import Service
from rlhfspec.service.bus import Delivery, StageBus, kept_in_progress
from rlhfspec.service.vitals import Vitals

PULL_SECONDS = 0.5
ACK_WAIT_SECONDS = 60.0


class RewardService(Service):
    """Consumes Sample; produces Score; waits for finished samples; unblocked by generator.

    Where a source wants whole prompt groups, samples are held until their group is complete.
    """

    def __init__(self, worker: int, vitals: Vitals, bus: StageBus, *, job: RLHFJob, sources: RewardSources) -> None:
        super().__init__("reward", worker, vitals)
        self._bus = bus
        self._sources = sources
        self._deadline = job.spec.roles.reward.deadline_seconds
        self._group_size = job.spec.algorithm.samples_per_prompt if sources.grouping == "group" else 1
        # So many groups at once that every source is busy; those that wait for it have not begun their deadline.
        self._slots = asyncio.Semaphore(max(source.concurrency for source in job.spec.rewards.sources))
        self._held: dict[str, Delivery[Sample]] = {}
        self._groups: defaultdict[str, set[str]] = defaultdict(set)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        inbox = await self._bus.subscribe(Sample, ack_wait_seconds=ACK_WAIT_SECONDS, max_unacknowledged=1 << 16)
        with self.vitals.working("making the reward sources ready", deadline_seconds=self._deadline):
            await self._sources.start()
        try:
            async with kept_in_progress(self._held.values, every_seconds=ACK_WAIT_SECONDS / 4, clock=self._bus.clock):
                while not self.stopping.is_set():
                    with self.vitals.waiting("finished samples"):
                        pulling = inbox.pull(max_records=256, timeout_seconds=PULL_SECONDS)
                        for delivery in await self.unless_stopped(pulling):
                            self._collect(delivery)
                    self._raise_failure()
        finally:
            await self._end_tasks()
            await self._sources.close()

    def _collect(self, delivery: Delivery[Sample]) -> None:
        sample = delivery.record
        again = sample.id in self._held
        self._held[sample.id] = delivery
        if again:
            return  # delivered anew while it is held here: acknowledged once its score is out
        group = self._groups[sample.group_id if self._group_size > 1 else sample.id]
        group.add(sample.id)
        if len(group) == self._group_size:
            self._tasks.add(asyncio.create_task(self._score(sorted(group))))
            group.clear()

    async def _score(self, ids: list[str]) -> None:
        samples = [self._held[name].record for name in ids]
        async with self._slots:
            with self.vitals.working(f"reward of {samples[0].id}", deadline_seconds=self._deadline):
                for score in await self._sources.score_many(samples):
                    await self._bus.publish(score)
        for name in ids:
            await self._held.pop(name).ack()

    def _raise_failure(self) -> None:
        for task in [task for task in self._tasks if task.done()]:
            self._tasks.discard(task)
            task.result()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
