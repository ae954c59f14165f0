"""Idle workers that serve a scoring stage until their own work returns.

The guest is built and pulls records like that stage's workers, so its scores are bit-identical.
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
    """Scoring service that an idle worker hosts, created at first use."""

    def __init__(self, stage: str, make: Callable[[], Awaitable[Service]]) -> None:
        self.stage = stage
        self._make = make
        self._service: Service | None = None
        self._was_tried = False

    async def score_while(self, waiting: asyncio.Task[Any]) -> None:
        """Score samples until the host's wait `waiting` is done, and finish the current sample."""
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
        if self._service is not None:
            self._service.close()

    async def _made(self) -> Service | None:
        if not self._was_tried:
            self._was_tried = True
            try:
                self._service = await self._make()
            except (RLHFSpecError, OSError, RuntimeError) as error:  # torch raises RuntimeError when the device is full
                log.warning("cannot help %s while there are no prompts: %s", self.stage, error)
        return self._service


class HostedVitals(Vitals):
    def __init__(self, vitals: Vitals, stage: str, worker: int) -> None:
        super().__init__(vitals.clock)
        self._host = vitals.worker(stage, worker)

    def worker(self, stage: str, worker: int) -> WorkerVitals:
        return self._host
