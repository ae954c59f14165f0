"""Gives a worker that may have nothing to do a guest: one more worker of a scoring stage, in its process.

Only where each worker has a process of its own: in one process all stages compute on the same device already, and
loading beside them would change settings that they share.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from importlib import import_module

from rlhfspec.job import RLHFJob
from rlhfspec.messages.access.rights import GUESTS
from rlhfspec.messages.loop import workers_of
from rlhfspec.stage.base import Service
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.context import Context
from rlhfspec.stage.guest import HostedScoring, HostedVitals
from rlhfspec.stage.threads import ComputeThread

log = logging.getLogger("rlhfspec.stage")
Connect = Callable[[str, int], Awaitable[Bus]]  # as this worker of this stage, with its rights


def with_guest(job: RLHFJob, context: Context, connect: Connect) -> Context:
    """The context of a worker that a plan may find without work, where a scoring stage runs that it can help."""
    running = workers_of(job)
    helped = GUESTS.get(context.bus.stage.name, ())
    stage = next((stage for stage in helped if stage in running), None)
    if stage is None or "rebalancer" not in running:
        return context
    making = _Making(job, stage, running[stage] + context.worker, context, connect)
    return replace(context, hosted_scoring=HostedScoring(stage, making.service))


class _Making:
    """`worker`: beyond those that the job says the stage has, as of one that is started by hand."""

    def __init__(self, job: RLHFJob, stage: str, worker: int, host: Context, connect: Connect) -> None:
        self._job = job
        self._stage = stage
        self._worker = worker
        self._host = host
        self._connect = connect

    async def service(self) -> Service:
        """In a thread of its own, so that the event loop goes on."""
        vitals = HostedVitals(self._host.vitals, self._host.bus.stage.name, self._host.worker)
        host = vitals.worker(self._stage, self._worker)
        deadline = getattr(self._job.spec.roles, self._stage).deadline_seconds
        thread = ComputeThread(f"{self._stage}-build")
        try:
            with host.working(f"making ready to help {self._stage}", deadline_seconds=deadline):
                bus = await self._connect(self._stage, self._worker)
                return await thread.in_thread(self._build, bus, vitals)
        finally:
            thread.close()

    def _build(self, bus: Bus, vitals: HostedVitals) -> Service:
        context = Context(
            worker=self._worker,
            bus=bus.of(self._stage, self._worker),
            weights=self._host.weights,
            vitals=vitals,
            run=self._host.run,
            say=lambda text: log.info("%s, to help %s", text, self._stage),
        )
        service: Service = import_module(f"rlhfspec.{self._stage}.build").build(self._job, context)
        return service
