"""Processes of one generator that share a model: rank 0 is the worker and starts the others; all end together."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING

from rlhfspec.common.gpus import VISIBLE, see_only
from rlhfspec.common.ranks import SECRET
from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.worker import exits
from rlhfspec.worker.last_words import write_last_words
from rlhfspec.worker.process import STARTED

if TYPE_CHECKING:
    from rlhfspec.common.ranks.group import Ranks

_IDLE_SECONDS = 7 * 86400.0  # a generator may have nothing to do for long; a rank 0 that is gone is noticed at once
_IMPORT_SECONDS = 60.0  # the others are no forks of a process that has imported all
_LEAVE_SECONDS = 5.0
log = logging.getLogger("rlhfspec.stage")


@contextmanager
def led(job: RLHFJob) -> Iterator[Ranks | None]:
    """Start the other ranks and yield rank 0, or None for a single process."""
    count = job.spec.num_processes("generator")
    if count == 1:
        yield None
        return
    environment = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(_free_port()), SECRET: secrets.token_hex(32)}
    leaving = Event()
    others = [Thread(target=_keep, args=(rank, environment, leaving), daemon=True) for rank in range(1, count)]
    for other in others:
        other.start()
    os.environ.update(environment, RANK="0", LOCAL_RANK="0")
    see_only(None, os.environ)
    with joined_by(job) as ranks:
        try:
            yield ranks
        finally:
            leaving.set()
    for other in others:
        other.join(_LEAVE_SECONDS)


@contextmanager
def joined_by(job: RLHFJob) -> Iterator[Ranks]:
    """Join the group that the environment names."""
    from rlhfspec.common.ranks.meeting import joined
    from rlhfspec.huggingface.devices import device_of

    if job.spec.device == "cpu":
        os.environ[VISIBLE] = ""  # transformers would load the parts onto GPUs
    device, deadline = device_of(job.spec), job.spec.roles.generator.deadline_seconds
    with joined(
        timeout_seconds=deadline,
        silence_seconds=_IDLE_SECONDS,
        device=device,
        stage="generator",
        tell_seconds=_IMPORT_SECONDS,
    ) as ranks:
        refuse_shared(ranks.gather((device, os.environ.get(VISIBLE))))
        yield ranks


def refuse_shared(places: Sequence[tuple[str, str | None]]) -> None:
    """Raise InvalidRequest if two processes use one GPU. Each place is a device and its CUDA_VISIBLE_DEVICES.

    >>> refuse_shared([("cuda:0", "3"), ("cuda:0", "4")]), refuse_shared([("cuda:0", None), ("cuda:1", None)])
    (None, None)
    >>> refuse_shared([("cuda:0", "3"), ("cuda:0", "3")])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    rlhfspec.errors.InvalidRequest: CUDA_VISIBLE_DEVICES: each process of a generator needs a GPU of its own ...
    """
    if len(set(places)) < len(places) and places[0][0] != "cpu":
        seen = ", ".join(str(gpus) for _, gpus in places)
        raise InvalidRequest(VISIBLE, seen, "each process of a generator needs a GPU of its own")


def _keep(rank: int, environment: dict[str, str], leaving: Event) -> None:
    """Start a rank and end as it ends; the system kills it when this thread ends."""
    told = os.environ | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    told.setdefault(STARTED, "generator")
    other = subprocess.Popen([sys.executable, "-m", "rlhfspec.generator", *sys.argv[1:]], env=told)
    code = other.wait()
    if leaving.is_set():
        return
    said = f"process {rank} of this generator {exits.said(code)}"
    log.warning("%s", said)
    if code < 0:
        write_last_words(said)  # it had none itself
        signal.raise_signal(signal.Signals(-code))
    os._exit(code if code > 0 else exits.ERROR)  # the first process of a container is not killed by itself


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
