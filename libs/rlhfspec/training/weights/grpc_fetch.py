"""Fetch of one version from the trainer or a peer, with a deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rlhfspec.common.awake_clock import AwakeClock
from rlhfspec.errors import StorageError, WeightsVersionError
from rlhfspec.messages.records import Weights
from rlhfspec.training.weights.grpc_client import FetchOutcome, GrpcWeightClient
from rlhfspec.training.weights.packed import PackedWeights

log = logging.getLogger(__name__)
_FETCH_RETRY_SECONDS = 0.1
MAX_WRONG = 3  # attempts with bytes that do not match the record
BUSY = 10  # factor of `wait_seconds` for a busy trainer


class Fetch:
    """Fetch from the trainer, or from peers for versions that it lacks.

    Attempts end `wait_seconds` after the first. Busy replies extend this by up to `BUSY` times `wait_seconds`.
    """

    def __init__(
        self,
        record: Weights,
        client: GrpcWeightClient,
        *,
        trainer_address: Callable[[], str | None],
        peer_addresses: Callable[[], Iterable[str]],
        wait_seconds: float,
    ) -> None:
        self._record = record
        self._client = client
        self._trainer_address = trainer_address
        self._peer_addresses = peer_addresses
        self._wait_seconds = wait_seconds
        self._num_wrong = 0
        self._have = 0
        self._problem = "no trainer is known"

    def run(self) -> PackedWeights:
        clock = AwakeClock()
        began = since = clock.now()
        while not self._client.closed.is_set() and clock.now() - since <= self._wait_seconds:
            outcome = self._from_trainer() or self._from_peers()
            if outcome is not None and outcome.packed is not None:
                return outcome.packed
            if outcome is not None and outcome.kind == "busy":
                since = min(clock.now(), began + BUSY * self._wait_seconds)
            self._client.closed.wait(_FETCH_RETRY_SECONDS)
        raise self._error(f"could not be fetched: {self._problem}")

    def _from_trainer(self) -> FetchOutcome | None:
        """Fetch from the trainer, or return None if peers should be tried."""
        address = self._trainer_address()
        if address is None:
            return None
        outcome = self._take(address)
        if outcome.kind == "other":
            raise StorageError(self._record.uri, outcome.problem)
        if outcome.kind == "missing" and outcome.have > self._record.version:
            raise self._error("is not kept")
        return outcome if outcome.kind in ("whole", "busy") else None

    def _from_peers(self) -> FetchOutcome | None:
        for address in self._peer_addresses():
            outcome = self._take(address)
            if outcome.kind == "whole":
                return outcome
        return None

    def _take(self, address: str) -> FetchOutcome:
        outcome = self._client.take(address, self._record)
        self._have = max(self._have, outcome.have)
        if outcome.kind in ("failed", "wrong", "missing", "busy"):
            self._problem = outcome.problem or f"{address}: {outcome.kind}"
            log.info("weights %s: %s", self._record.id, self._problem)
        if outcome.kind == "wrong":
            self._num_wrong += 1
            if self._num_wrong == MAX_WRONG:
                raise StorageError(self._record.uri, self._problem)
        return outcome

    def _error(self, problem: str) -> WeightsVersionError:
        return WeightsVersionError(self._record.version, self._have, f"{self._record.uri} {problem}")
