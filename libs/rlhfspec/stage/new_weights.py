"""Loading of announced weights, with retries while they are unavailable."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlhfspec.errors import WeightsVersionError
from rlhfspec.messages.records import Weights
from rlhfspec.messages.transport.clock import Clock
from rlhfspec.stage.base import Service

if TYPE_CHECKING:
    from rlhfspec.training.weights import WeightStore

_WEIGHTS_RETRY_SECONDS = 0.25
log = logging.getLogger("rlhfspec.stage")


async def load_newest(
    service: Service,
    store: WeightStore,
    records: Sequence[Weights],
    load: Callable[..., None],
    *,
    deadline_seconds: float,
    clock: Clock,
) -> None:
    """Pass the newest stored version of `records` to `load` in the worker's thread, retrying until a stop."""
    from rlhfspec.training.weights import newest_kept

    def get_and_load() -> WeightsVersionError | None:
        try:
            found = newest_kept(store, records)
        except WeightsVersionError as error:
            return error
        if found is not None:
            record, tensors = found
            load(tensors, version=record.version)
        return None

    newest, is_told = max(record.version for record in records), False
    with service.vitals.working(f"loading weights version {newest}", deadline_seconds=deadline_seconds):
        while not service.stopping.is_set() and (problem := await service.in_thread(get_and_load)) is not None:
            if not is_told:
                log.warning("%s %d: new weights are not available yet: %s", service.stage, service.worker, problem)
            is_told = True
            await service.unless_stopped(clock.sleep(_WEIGHTS_RETRY_SECONDS))
