"""A guest of a worker that may have nothing to do: one more worker of a scoring stage, in its process.

Only where each worker has a process of its own: in one process all stages compute on the same device already, and
loading beside them would change settings that they share.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from functools import partial
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


def guest_of(job: RLHFJob, host: Context, connect: Connect) -> HostedScoring | None:
    """Return the guest of a worker that a plan may find without work; None where it can help no scoring stage.

    The guest is a worker beyond those that the job says the stage has, as one that is started by hand.
    """
    running = workers_of(job)
    stage = next((stage for stage in GUESTS.get(host.bus.stage.name, ()) if stage in running), None)
    if stage is None or "rebalancer" not in running:
        return None
    return HostedScoring(stage, partial(_make, job, stage, running[stage] + host.worker, host, connect))


async def _make(job: RLHFJob, stage: str, worker: int, host: Context, connect: Connect) -> Service:
    """Build the guest in a thread of its own, so that the event loop goes on."""
    vitals = HostedVitals(host.vitals, host.bus.stage.name, host.worker)
    deadline = getattr(job.spec.roles, stage).deadline_seconds
    thread = ComputeThread(f"{stage}-build")
    try:
        with vitals.worker(stage, worker).working(f"making ready to help {stage}", deadline_seconds=deadline):
            bus = await connect(stage, worker)
            context = Context(
                worker=worker,
                bus=bus.of(stage, worker),
                weights=host.weights,
                vitals=vitals,
                run=host.run,
                say=lambda text: log.info("%s, to help %s", text, stage),
            )
            build = import_module(f"rlhfspec.{stage}.build").build
            service: Service = await thread.in_thread(build, job, context)
            return service
    finally:
        thread.close()
