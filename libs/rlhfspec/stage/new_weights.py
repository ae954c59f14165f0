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
Load = Callable[[dict[str, Any], int], None]


class NewWeights:
    """Brings the newest announced version to `load(tensors, version)`, which runs in the worker's thread.

    The process that has them may just be starting again: what cannot be had for now is asked for again until it comes,
    the worker is asked to stop, or `deadline_seconds` are over and supervision ends the run, naming the version.
    """

    def __init__(
        self, service: Service, store: WeightStore, load: Load, *, deadline_seconds: float, clock: Clock
    ) -> None:
        self._service = service
        self._store = store
        self._load = load
        self._deadline = deadline_seconds
        self._clock = clock

    async def take(self, records: Sequence[Weights]) -> None:
        newest = max(record.version for record in records)
        with self._service.vitals.working(f"loading weights version {newest}", deadline_seconds=self._deadline):
            told = False
            while not self._service.stopping.is_set():
                problem = await self._service.in_thread(self._try, records)
                if problem is None:
                    return
                if not told:
                    log.warning("%s %d: not to be had yet: %s", self._service.stage, self._service.worker, problem)
                told = True
                await self._service.unless_stopped(self._pause())

    def _try(self, records: Sequence[Weights]) -> WeightsVersionError | None:
        from rlhfspec.training.weights import newest_kept

        try:
            found = newest_kept(self._store, records)
        except WeightsVersionError as error:
            return error
        if found is not None:
            record, tensors = found
            self._load(tensors, record.version)
        return None

    async def _pause(self) -> list[None]:
        await self._clock.sleep(_RETRY_SECONDS)
        return []
