"""Meeting of ranks: a process joins the others and gets its process groups."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlhfspec.common.ranks import RankTold, rank_told
from rlhfspec.common.ranks.group import Ranks
from rlhfspec.common.ranks.store import is_here, opened, prove
from rlhfspec.errors import StageStalled

_SLOW_JOIN_SECONDS = 10.0
_INTERFACE = "GLOO_SOCKET_IFNAME"
log = logging.getLogger("rlhfspec.common.ranks")


@contextmanager
def joined(
    *,
    timeout_seconds: float,
    silence_seconds: float,
    device: str = "cpu",
    stage: str = "trainer",
    tell_seconds: float = _SLOW_JOIN_SECONDS,
    tensor_parallel: int = 1,
) -> Iterator[Ranks]:
    """Join the ranks that the environment names, or only this process, and yield its `Ranks`.

    `timeout_seconds` limits one exchange, `silence_seconds` the wait for rank 0's next command. A join that takes
    `tell_seconds` is logged.
    """
    told = rank_told(os.environ)
    if told.num_ranks == 1:
        yield Ranks()
        return
    waits = _WaitsForOthers(told, stage, timeout_seconds, tell_seconds)
    try:
        with waits, _on_loopback(is_here(told.leader)):
            usual, patient = timedelta(seconds=timeout_seconds), timedelta(seconds=silence_seconds)
            store = opened(told, usual)
            options = _group_of(torch.device(device))
            dist.init_process_group(store=store, rank=told.rank, world_size=told.num_ranks, timeout=usual, **options)
            if options == {"backend": "gloo"}:
                prove(None, told.rank, told.num_ranks, told.secret, usual)
            ranks = Ranks(
                rank=told.rank,
                num_ranks=told.num_ranks,
                silence_seconds=silence_seconds,
                commands=_host_group(told, usual, patience=patient),
                host=_host_group(told, usual),
            )
            if tensor_parallel > 1:
                ranks = _cutting(ranks, told, tensor_parallel, usual, torch.device(device))
        yield ranks
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _host_group(
    told: RankTold, timeout: timedelta, members: Sequence[int] | None = None, *, patience: timedelta | None = None
) -> Any:
    """Create a gloo group of `members` (default: all) whose exchanges wait up to `patience`, by default `timeout`."""
    members = range(told.num_ranks) if members is None else members
    group = dist.new_group(list(members), timeout=patience or timeout, backend="gloo")
    if told.rank in members:
        prove(group, members.index(told.rank), len(members), told.secret, timeout)
    return group


def _cutting(ranks: Ranks, told: RankTold, tensor_parallel: int, timeout: timedelta, device: torch.device) -> Ranks:
    """Return `ranks` with its tensor-parallel group (consecutive ranks) and FSDP2 group (ranks with the same part)."""
    rows = torch.arange(ranks.num_ranks).reshape(-1, tensor_parallel)

    def group_of(sets: list[list[int]]) -> Ranks:
        """Create all groups, as every rank must, and return the one of this rank."""
        found = None
        for members in sets:
            host = _host_group(told, timeout, members)
            there = host if device.type == "cpu" else dist.new_group(members, timeout=timeout)
            if ranks.rank in members:
                place = members.index(ranks.rank)
                found = Ranks(rank=place, num_ranks=len(members), host=host, device=there)
        assert found is not None
        return found

    return replace(ranks, tensor=group_of(rows.tolist()), data=group_of(rows.T.tolist()))


class _WaitsForOthers:
    """Context that logs a long wait, and raises StageStalled, naming the missing ranks, on torch's errors."""

    def __init__(self, told: RankTold, stage: str, timeout_seconds: float, tell_seconds: float) -> None:
        self._told, self._stage, self._seconds = told, stage, timeout_seconds
        self._others = f"the other {told.num_ranks - 1} ranks" if told.rank == 0 else f"rank 0 at {told.leader}"
        said = ["rank %d of %d waits for %s", told.rank, told.num_ranks, self._others]
        self._telling = threading.Timer(tell_seconds, log.warning, said)
        self._telling.daemon = True

    def __enter__(self) -> None:
        self._telling.start()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._telling.cancel()
        if isinstance(error, (RuntimeError, OSError)):
            problem = f"waited for {self._others} for {self._seconds:g} s: {str(error).splitlines()[0]}"
            raise StageStalled(self._stage, self._told.rank, self._others, self._seconds, problem) from error


@contextmanager
def _on_loopback(is_local: bool) -> Iterator[None]:
    if not is_local:
        yield
        return
    before = os.environ.get(_INTERFACE)
    os.environ[_INTERFACE] = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    try:
        yield
    finally:
        del os.environ[_INTERFACE]
        if before is not None:
            os.environ[_INTERFACE] = before


def _group_of(device: torch.device) -> dict[str, Any]:
    """Set the current device, and return the arguments of `init_process_group` for it."""
    if device.type == "cpu":
        return {"backend": "gloo"}
    module: Any = torch.get_device_module(device)
    if device.index is not None:
        module.set_device(device)
    backends = f"cpu:gloo,{device.type}:{dist.Backend.default_device_backend_map[device.type]}"
    if device.type != "cuda":
        return {"backend": backends}
    return {"backend": backends, "device_id": torch.device("cuda", module.current_device())}
