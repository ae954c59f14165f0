"""Sending of one trainer rank's share of a weights version."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from rlhfspec.training.weights.group.channel import BUCKET_SECONDS, Channels, Place, TwoBuffers, name_of
from rlhfspec.training.weights.group.plan import bucket_digest, buckets, fill
from rlhfspec.training.weights.packed import WeightsHeader


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Transfer parameters for every rank. `place` is rank 0's place in the process group."""

    place: Place
    header: WeightsHeader
    num_senders: int
    bucket_bytes: int
    deadline_seconds: float  # until the last bucket must be under way

    def fields(self) -> dict[str, Any]:
        return {**asdict(self), "header": self.header.model_dump_json()}

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Told:
        header = WeightsHeader.model_validate_json(told["header"])
        return cls(**{**told, "place": Place(**told["place"]), "header": header})


class Shares:
    """Sender of a rank's shares that reuses its channel within an epoch (unchanged membership)."""

    def __init__(self) -> None:
        self._channels = Channels()

    def send(self, told: Told, weights: Mapping[str, Tensor], rank: int = 0, **own: str) -> list[str]:
        """Send this rank's share and return its bucket digests. `own`: this rank's host and device.

        If a receiver times out, close the group and raise RuntimeError.
        """
        place = replace(told.place, sender=rank, **own)  # type: ignore[arg-type]
        self._channels.keep_only(place.epoch)
        try:
            return self._sent(told, place, weights)
        except RuntimeError:
            self._channels.close()
            raise

    def _sent(self, told: Told, place: Place, weights: Mapping[str, Tensor]) -> list[str]:
        deadline = time.monotonic() + told.deadline_seconds
        channel, rank = self._channels.of(place), place.sender
        plan = buckets(told.header, rank, told.num_senders, told.bucket_bytes)
        spare, digests = TwoBuffers(plan, place.device), []
        under_way: Callable[[float], None] = lambda _: None  # noqa: E731
        for number, bucket in enumerate(plan):
            content = fill(bucket, spare[number], weights, rank, told.num_senders)
            digests.append(bucket_digest(content, name_of(told.header, rank, number)))
            under_way(BUCKET_SECONDS)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{number} of {len(plan)} buckets sent in {told.deadline_seconds:.0f} s: too slow")
            under_way = channel.broadcast(content)
        under_way(BUCKET_SECONDS)
        return digests

    def close(self) -> None:
        self._channels.close()
