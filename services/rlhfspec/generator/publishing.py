"""Samples on their way to the stages that score them, while the engine goes on."""

from __future__ import annotations

import asyncio

from rlhfspec.messages.records import Load, Prompt, Sample
from rlhfspec.stage.bus import Delivery, StageBus

Made = tuple[Delivery[Prompt], Sample]


class SamplePublisher:
    """Publishes the samples of one burst at a time: the way to the server and back costs the engine nothing."""

    def __init__(self, bus: StageBus) -> None:
        self._bus = bus
        self._task: asyncio.Task[None] | None = None  # the samples of the last burst

    def begin(self, load: Load | None, made: list[Made]) -> None:
        """Publish these from now on. The burst before must be out."""
        self._task = asyncio.create_task(self._publish(load, made))

    async def done(self) -> None:
        """Wait until the last burst is out: never more than one is on its way."""
        if self._task is not None:
            await self._task
            self._task = None

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _publish(self, load: Load | None, made: list[Made]) -> None:
        if load is not None:
            await self._bus.publish(load)
        await asyncio.gather(*(self._answer(delivery, sample) for delivery, sample in made))

    async def _answer(self, delivery: Delivery[Prompt], sample: Sample) -> None:
        await self._bus.publish(sample)
        await delivery.ack()
