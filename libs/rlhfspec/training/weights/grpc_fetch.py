"""Gets one version from where it can be had: the trainer, whom the trainer names, or any peer; until time is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from rlhfspec.errors import StorageError, WeightsVersionError
from rlhfspec.messages.records import Weights
from rlhfspec.training.weights.grpc_client import FetchOutcome, GrpcWeightClient, Patience
from rlhfspec.training.weights.grpc_messages import MAX_LOST, WeightsRequest
from rlhfspec.training.weights.kept import KeptVersions, Version

log = logging.getLogger(__name__)
_RETRY_SECONDS = 0.1
MAX_WRONG = 3  # times that the bytes were not those announced


class Fetch:
    def __init__(
        self,
        record: Weights,
        version: Version,
        *,
        kept: KeptVersions,
        client: GrpcWeightClient,
        trainer_address: Callable[[], str | None],
        peer_addresses: Callable[[], Iterable[str]],
        own_address: str,
        patience: Patience,
    ) -> None:
        self._record = record
        self._version = version
        self._kept = kept
        self._client = client
        self._trainer_address = trainer_address
        self._peer_addresses = peer_addresses
        self._own_address = own_address
        self._patience = patience
        self._lost: dict[str, None] = {}  # peers that could not give it, in order
        self._num_wrong = 0
        self._have = 0
        self._problem = "no trainer is known"

    def run(self) -> Version:
        try:
            while not self._patience.is_over:
                if self._from_trainer() or self._from_peers():
                    return self._version
                self._patience.closed.wait(_RETRY_SECONDS)
        finally:
            self._version.lose()  # unless it is whole
            self._kept.arrived(self._version)
        raise self._error(f"could not be had: {self._problem}")

    def _from_trainer(self) -> bool:
        """Also through those whom it names, one after the other."""
        while (address := self._trainer_address()) is not None and not self._patience.is_over:
            outcome = self._take(address)
            if outcome.kind == "other":
                raise StorageError(self._record.uri, outcome.problem)
            if outcome.kind == "missing" and outcome.have > self._record.version:
                raise self._error("is not kept")
            if outcome.kind == "missing":
                break
            if outcome.kind != "ask":
                return outcome.kind == "whole"
            if outcome.peer in self._lost or outcome.peer == self._own_address:
                return False
            if self._take(outcome.peer).kind == "whole":
                return True
            self._lost[outcome.peer] = None
        return False

    def _from_peers(self) -> bool:
        """Those who have all of it: for when the trainer is away, or went back to a checkpoint."""
        others = [peer for peer in self._peer_addresses() if peer != self._own_address]
        return any(self._take(peer, only_whole=True).kind == "whole" for peer in others)

    def _take(self, address: str, *, only_whole: bool = False) -> FetchOutcome:
        request = WeightsRequest(
            job=self._record.job,
            role=self._record.role,
            version=self._record.version,
            offset=self._version.num_bytes,
            address=self._own_address,
            lost=list(self._lost)[-MAX_LOST:],
            direct=self._num_wrong > 0,
            only_whole=only_whole,
        )
        outcome = self._client.take(address, request, self._record, self._version, self._patience)
        self._have = max(self._have, outcome.have)
        if outcome.kind in ("failed", "wrong", "missing", "busy"):
            self._problem = outcome.problem or f"{address}: {outcome.kind}"
            log.info("weights %s: %s", self._record.id, self._problem)
        if outcome.kind == "wrong":
            self._begin_again()
        return outcome

    def _begin_again(self) -> None:
        """Nothing of what came is believed, and the trainer is asked for all of it."""
        self._num_wrong += 1
        if self._num_wrong == MAX_WRONG:
            raise StorageError(self._record.uri, self._problem)
        self._version.lose()
        self._version = self._kept.expect_anew(self._version.key)

    def _error(self, problem: str) -> WeightsVersionError:
        return WeightsVersionError(self._record.version, self._have, f"{self._record.uri} {problem}")
