"""Ranks of one generator that share a model. Rank 0 is the worker and starts the others."""

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

_MAX_SILENCE_SECONDS = 7 * 86400.0  # generators may idle for long; a lost rank 0 is noticed at once
_IMPORT_SECONDS = 60.0  # the other ranks import everything themselves
_JOIN_RANK_SECONDS = 5.0
log = logging.getLogger("rlhfspec.stage")


@contextmanager
def led(job: RLHFJob) -> Iterator[Ranks | None]:
    """Start the generator's other ranks and yield rank 0, or None for a single process."""
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
        other.join(_JOIN_RANK_SECONDS)


@contextmanager
def joined_by(job: RLHFJob) -> Iterator[Ranks]:
    """Join the group named by the environment, and yield this rank."""
    from rlhfspec.common.ranks.meeting import joined
    from rlhfspec.huggingface.devices import device_of

    if job.spec.device == "cpu":
        os.environ[VISIBLE] = ""  # transformers would load the parts onto GPUs
    device, deadline = device_of(job.spec), job.spec.roles.generator.deadline_seconds
    with joined(
        timeout_seconds=deadline,
        silence_seconds=_MAX_SILENCE_SECONDS,
        device=device,
        stage="generator",
        tell_seconds=_IMPORT_SECONDS,
    ) as ranks:
        refuse_shared(ranks.gather((device, os.environ.get(VISIBLE))))
        yield ranks


def refuse_shared(places: Sequence[tuple[str, str | None]]) -> None:
    """Raise InvalidRequest if two ranks share a GPU. A place is a device and its CUDA_VISIBLE_DEVICES.

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
    """Run a rank in a subprocess; if it ends before `leaving` is set, end this process in the same way."""
    told = os.environ | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    told.setdefault(STARTED, "generator")
    other = subprocess.Popen([sys.executable, "-m", "rlhfspec.generator", *sys.argv[1:]], env=told)
    code = other.wait()
    if leaving.is_set():
        return
    said = f"process {rank} of this generator {exits.said(code)}"
    log.warning("%s", said)
    if code < 0:
        write_last_words(said)  # a killed process wrote none
        signal.raise_signal(signal.Signals(-code))
    os._exit(code if code > 0 else exits.ERROR)  # PID 1 of a container cannot signal itself


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
