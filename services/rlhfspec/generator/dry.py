"""What a generator does while it has nothing to do: what the rebalancer's plan says (docs/rebalancing.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rlhfspec.engine.base import Learning
from rlhfspec.messages.records import Plan
from rlhfspec.stage.base import PULL_SECONDS, Service
from rlhfspec.stage.bus import StageBus
from rlhfspec.stage.guest import HostedScoring


class IdleScoring:
    """Of one generator. The latest plan counts; without one, its drafter learns as long as it may, and it waits.

    `hosted_scoring`: the stage that it may score for; None: nowhere in this job, and no plan is read. `learning` is its
    drafter's, where it learns; that ends where what was learnt `is_to_go`. `news`: of the generator, for
    which it waits; a plan that says something else is news too.
    """

    def __init__(
        self,
        generator: Service,
        bus: StageBus,
        hosted_scoring: HostedScoring | None,
        learning: Learning | None,
        is_to_go: Callable[[], bool],
        news: asyncio.Event,
    ) -> None:
        self._generator = generator
        self._bus = bus
        self._hosted_scoring = hosted_scoring
        self._learning = learning
        self._is_to_go = is_to_go
        self._news = news
        self._is_to_score = False
        if hosted_scoring is not None:
            generator.leaving.callback(hosted_scoring.close)

    async def follow(self) -> None:
        """Reads the plans."""
        if self._hosted_scoring is None:
            return
        async with await self._bus.subscribe(Plan) as inbox:
            while not self._generator.stopping.is_set():
                pulling = inbox.pull(max_records=1024, timeout_seconds=PULL_SECONDS)
                for delivery in await self._generator.unless_stopped(pulling):
                    self._take(delivery.record)

    async def until_news(self) -> None:
        """Scores meanwhile, where the plan says so, or learns; after news what is at hand is still done."""
        waiting = asyncio.create_task(_set(self._news))
        try:
            if self._hosted_scoring is not None and self._is_to_score:
                await self._hosted_scoring.score_while(waiting)
            else:
                learning = self._learning
                while learning and not waiting.done() and await self._generator.in_thread(learning.learn_while_idle):
                    if self._is_to_go():
                        return
                await waiting
        finally:
            waiting.cancel()

    def _take(self, plan: Plan) -> None:
        is_to_score = plan.dry.get(self._generator.worker) == "score"
        if is_to_score != self._is_to_score:
            self._is_to_score = is_to_score
            self._news.set()


async def _set(event: asyncio.Event) -> None:
    await event.wait()
