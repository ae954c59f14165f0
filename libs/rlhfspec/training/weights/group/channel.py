"""Process groups of one trainer rank and all receiving generators.

A member that misses a deadline ends the group for all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlhfspec.training.weights.group.plan import Bucket
from rlhfspec.training.weights.packed import WeightsHeader

Backend = Literal["gloo", "nccl"]
FORM_SECONDS = 5.0
BUCKET_SECONDS = 10.0
_POLL_SECONDS = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    meeting: str  # host:port of the trainer's rendezvous store
    epoch: str
    sender: int  # rank of the sending trainer process
    rank: int  # in the group; 0: the sender
    size: int
    backend: Backend
    host: str
    device: str


class Channel:
    """Channel of broadcasts from one trainer rank, with deadlines. After a failure, every call raises RuntimeError."""

    def __init__(self, place: Place) -> None:
        self._place = place
        host, _, port = place.meeting.rpartition(":")
        patience = timedelta(seconds=FORM_SECONDS)
        distributed: Any = dist
        store = distributed.TCPStore(
            host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=patience
        )
        self._group = _group_of(place, distributed.PrefixStore(f"{place.epoch}/{place.sender}", store), patience)

    def broadcast(self, content: Tensor) -> Callable[[float], None]:
        """Start a broadcast and return a function that waits for it, with a timeout in seconds."""
        options: Any = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=BUCKET_SECONDS)
        return partial(self._wait, self._group.broadcast([content], options))

    def _wait(self, work: Any, seconds: float) -> None:
        if self._place.backend == "gloo":
            work.wait(timedelta(seconds=max(seconds, _POLL_SECONDS)))
            return
        deadline = time.monotonic() + seconds
        while not work.is_completed():  # a host that waits in NCCL waits for ever
            if time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"a broadcast did not finish within {seconds:g} s")
            time.sleep(_POLL_SECONDS)
        work.wait()

    def close(self) -> None:
        """Abort an NCCL group. Pending gloo work ends by itself in gloo's threads."""
        if self._place.backend == "nccl":
            self._group.abort()


def _group_of(place: Place, store: Any, patience: timedelta) -> Any:
    distributed: Any = dist
    if place.backend == "gloo":
        kind = distributed.ProcessGroupGloo
        options = kind._Options()
        options._timeout = patience
        options._devices = [kind.create_device(hostname=place.host)]
        return kind(store, place.rank, place.size, options)
    if (device := torch.device(place.device)).index is not None:
        torch.cuda.set_device(device)  # of this thread
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = patience
    return distributed.ProcessGroupNCCL(store, place.rank, place.size, options)


class Channels:
    def __init__(self) -> None:
        self._epoch = ""
        self._by_sender: dict[int, Channel] = {}

    def keep_only(self, epoch: str) -> None:
        if self._epoch != epoch:
            self.close()
            self._epoch = epoch

    def of(self, place: Place) -> Channel:
        if place.sender not in self._by_sender:
            self._by_sender[place.sender] = Channel(place)
        return self._by_sender[place.sender]

    def close(self) -> None:
        self._epoch = ""
        for channel in self._by_sender.values():
            channel.close()
        self._by_sender = {}  # threads of a closed epoch keep the old ones


class TwoBuffers:
    """Double buffer: one is in transfer while the other is filled or read."""

    def __init__(self, plan: Sequence[Bucket], device: str) -> None:
        self._num_bytes = max((bucket.num_bytes for bucket in plan), default=0)
        self._device = device
        self._made: dict[int, Tensor] = {}

    def __getitem__(self, number: int) -> Tensor:
        which = number % 2
        if which not in self._made:
            self._made[which] = torch.zeros(self._num_bytes, dtype=torch.uint8, device=self._device)
        return self._made[which]


def name_of(header: WeightsHeader, sender: int, number: int) -> str:
    return f"{header.job}/{header.role}/{header.version}/{sender}/{number}"
