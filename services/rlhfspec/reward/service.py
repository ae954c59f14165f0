from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import DatasetInfo, Purpose, Sample
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import Delivery, StageBus, give_back
from rlhfspec.stage.vitals import Vitals
from rlhfspec.training.scoring.rewards.sources import RewardSources


class RewardService(Service):
    """Reward worker. If a source scores whole groups, samples wait for their group."""

    def __init__(self, worker: int, vitals: Vitals, bus: StageBus, *, job: RLHFJob, sources: RewardSources) -> None:
        super().__init__("reward", worker, vitals)
        self._bus = bus
        self.sources = sources
        self._deadline = job.spec.roles.reward.deadline_seconds
        evaluation = job.spec.evaluation
        self._group_sizes: dict[Purpose, int] = {
            "training": job.spec.algorithm.samples_per_prompt,
            "evaluation": evaluation.samples_per_prompt if evaluation else 1,
        }
        # Enough groups to keep every source busy; the deadline of waiting ones has not begun.
        self._slots = asyncio.Semaphore(sources.concurrency)
        self._held: dict[str, Delivery[Sample]] = {}
        self._groups: defaultdict[str, set[str]] = defaultdict(set)
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed = asyncio.Event()  # set when a task failed
        self._told_seconds = 0.0  # of work on published scores

    async def run(self) -> None:
        with self.vitals.working("preparing the reward sources", deadline_seconds=self._deadline):
            await self.sources.start()
        try:
            await self._check_columns()
            async with await self._bus.subscribe(Sample) as inbox:
                while not self.stopping.is_set():
                    with self.vitals.waiting("finished samples"):
                        pulling = inbox.pull(max_records=256, timeout_seconds=PULL_SECONDS)
                        for delivery in await self.unless_stopped(pulling, self._failed):
                            self._collect(delivery)
                    self._raise_failure()
                await self._end_tasks()
                await give_back([delivery.held for delivery in self._held.values()])
        finally:
            await self._end_tasks()
            await self.sources.close()

    async def _check_columns(self) -> None:
        """Raise if the data lacks a column that a reward function uses."""
        async with await self._bus.subscribe(DatasetInfo) as inbox:
            while not self.stopping.is_set():
                with self.vitals.waiting("the columns of the dataset"):
                    arrived = await self.unless_stopped(inbox.pull(max_records=1, timeout_seconds=PULL_SECONDS))
                for delivery in arrived:
                    return self.sources.check_columns(delivery.record.columns)

    def _collect(self, delivery: Delivery[Sample]) -> None:
        sample = delivery.record
        again = sample.id in self._held
        self._held[sample.id] = delivery
        if again:
            return  # redelivered while held: acknowledged once its score is published
        whole = self._group_sizes[sample.purpose] if self.sources.grouping == "group" else 1
        group = self._groups[sample.group_id if whole > 1 else sample.id]
        group.add(sample.id)
        if len(group) == whole:
            self._begin(self._score(sorted(group)))
            group.clear()

    def _begin(self, scoring: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(scoring)
        task.add_done_callback(self._ended)
        self._tasks.add(task)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._failed.set()
        else:
            self._tasks.discard(task)

    async def _score(self, ids: list[str]) -> None:
        samples = [self._held[name].record for name in ids]
        async with self._slots:
            with self.vitals.working(f"scoring {samples[0].id}", deadline_seconds=self._deadline) as worked:
                scores = await self.sources.score_many(samples, worked.at, self.vitals.in_trouble)
        seconds = self._seconds_since_told() / len(scores)
        for score in scores:
            await self._bus.publish(replace(score, seconds=seconds))
        for name in ids:
            await self._held.pop(name).ack()

    def _seconds_since_told(self) -> float:
        """Return the busy seconds since the last call, because groups overlap and cannot be timed singly."""
        worked, before = self.vitals.state().busy_seconds, self._told_seconds
        self._told_seconds = worked
        return worked - before

    def _raise_failure(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()

    async def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
