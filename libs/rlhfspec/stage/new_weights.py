"""How a worker gets weights that were announced, and what it does when they cannot be had yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlhfspec.errors import WeightsVersionError
from rlhfspec.messages.records import Weights
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.stage.base import Service

if TYPE_CHECKING:
    from rlhfspec.training.weights import WeightStore

_RETRY_SECONDS = 0.25
log = logging.getLogger("rlhfspec.stage")


async def load_newest(
    service: Service,
    store: WeightStore,
    records: Sequence[Weights],
    load: Callable[[dict[str, Any], int], None],
    *,
    deadline_seconds: float,
    clock: Clock,
) -> None:
    """Bring the newest of these versions to `load(tensors, version)`, which runs in the worker's thread.

    The process that has them may just be starting again: what cannot be had for now is asked for again until it comes,
    the worker is asked to stop, or `deadline_seconds` are over and supervision ends the run, naming the version.
    """
    from rlhfspec.training.weights import newest_kept

    def get_and_load() -> WeightsVersionError | None:
        try:
            found = newest_kept(store, records)
        except WeightsVersionError as error:
            return error
        if found is not None:
            record, tensors = found
            load(tensors, record.version)
        return None

    newest, is_told = max(record.version for record in records), False
    with service.vitals.working(f"loading weights version {newest}", deadline_seconds=deadline_seconds):
        while not service.stopping.is_set() and (problem := await service.in_thread(get_and_load)) is not None:
            if not is_told:
                log.warning("%s %d: not to be had yet: %s", service.stage, service.worker, problem)
            is_told = True
            await service.unless_stopped(clock.sleep(_RETRY_SECONDS))
