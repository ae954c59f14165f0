"""A worker that has nothing to do as one more worker of a scoring stage, until there is something to do again.

The guest is the stage's own service, made by the stage's own builder, so its scores have the same bits; it pulls as the
stage's workers do, with the stage's own rights, and so takes what none of them has. What it does, its host does: no
other process sees a worker of it, and a host that dies with it is started again as what it was.

Only a worker with a process of its own has a guest: in one process all stages compute on the same device already, and
loading beside them would change settings that they share.

Example:
    >>> async def main() -> list[str]:
    ...     from rlhfspec.stage.base import Service
    ...     class Scorer(Service):
    ...         async def run(self) -> None:
    ...             with self.vitals.working("scoring sums/3/7/1", deadline_seconds=60.0):
    ...                 said.extend(state.what for state in vitals.snapshot())
    ...             await self.stopping.wait()
    ...     said: list[str] = []
    ...     vitals = Vitals()
    ...     async def make() -> Service:
    ...         return Scorer("reference", 2, HostedVitals(vitals, "generator", 1))
    ...     prompts = asyncio.create_task(asyncio.sleep(0.01))
    ...     await HostedScoring("reference", make).score_while(prompts)
    ...     return said
    >>> asyncio.run(main())
    ['scoring sums/3/7/1']
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from rlhfspec.errors import RLHFSpecError
from rlhfspec.stage.base import Service
from rlhfspec.stage.vitals import Vitals, WorkerVitals

log = logging.getLogger("rlhfspec.stage")


class HostedScoring:
    """`make`: builds the service, when it is first needed; it is kept. What cannot be made is said once, and not tried
    again: the host then only waits."""

    def __init__(self, stage: str, make: Callable[[], Awaitable[Service]]) -> None:
        self.stage = stage
        self._make = make
        self._service: Service | None = None
        self._was_tried = False

    async def score_while(self, waiting: asyncio.Task[Any]) -> None:
        """Until that is over, and the sample at hand then; what else it has pulled goes back. The first time the host
        waits for loading to end as well: that changes settings of the whole process, such as torch's default dtype."""
        service = await self._made()
        if service is None:
            await waiting
            return
        service.stopping.clear()
        running = asyncio.create_task(service.run())
        try:
            await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
            await service.stop()
            await running
        finally:
            running.cancel()

    def close(self) -> None:
        """Said by the host when its run is over."""
        if self._service is not None:
            self._service.close()

    async def _made(self) -> Service | None:
        if not self._was_tried:
            self._was_tried = True
            try:
                self._service = await self._make()
            except (RLHFSpecError, OSError, RuntimeError) as error:  # no room on the device is torch's RuntimeError
                log.warning("cannot help %s while there are no prompts: %s", self.stage, error)
        return self._service


class HostedVitals(Vitals):
    """All that a guest does is said of its host."""

    def __init__(self, vitals: Vitals, stage: str, worker: int) -> None:
        super().__init__(vitals.clock)
        self._host = vitals.worker(stage, worker)

    def worker(self, stage: str, worker: int) -> WorkerVitals:
        return self._host
