"""Preparation of models, data and the run folder, new or resumed."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhfspec.cluster.names import PREPARE
from rlhfspec.common.folder_lock import take_lock
from rlhfspec.common.object_store import ObjectStore
from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.job import RLHFJob
from rlhfspec.job.file import read_job
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.loop import workers_of
from rlhfspec.messages.servers.program import write_secret
from rlhfspec.prepare.checks import check_made_here, check_without_code, checked_rows
from rlhfspec.prepare.claim import check_digests, refuse_shared
from rlhfspec.prepare.hub import with_hub_models
from rlhfspec.prepare.tiny_paths import fetch_made, with_tiny_paths
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.worker.mirror import mirrored

_RUN_FREE_BYTES = 1 << 20  # least free space to begin a run
log = logging.getLogger("rlhfspec.stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Result of `prepare`. `num_steps`: steps already trained in the folder."""

    folder: Path
    num_steps: int

    def __str__(self) -> str:
        """Return one line for the log.

        >>> print(Prepared(folder=Path("runs/sums"), num_steps=0))
        prepared: runs/sums (new run)
        """
        there = f"existing run with {self.num_steps} steps" if self.num_steps else "new run"
        return f"prepared: {self.folder} ({there})"


def prepare(connections: Connections, source: Path) -> Prepared:
    """Prepare the job; safe to repeat after a kill. Raise InvalidRequest or StorageError."""
    mirror = mirrored(connections, PREPARE, 0)
    if mirror is not None:
        mirror.fetch_inputs(source)
    prepared = _prepare(connections, source, None if mirror is None else mirror.store)
    if mirror is not None:
        mirror.send_inputs(connections.job_file)
        mirror.send()
    return prepared


def _prepare(connections: Connections, source: Path, store: ObjectStore | None) -> Prepared:
    base = connections.base_folder
    with _needs_room(base):
        written = read_job(source, base=base, runs_here=False)
        check_made_here(written, source)
        if store is not None:
            fetch_made(written, store)
        job = with_tiny_paths(written, log.info)
        if store is None:  # shared by all pods; with a store each fetches its own
            job = with_hub_models(job, log.info)
            check_digests(job)
        checked_rows(job)
        check_without_code(job)
        refuse_shared(connections.folder, base)
        with RunFolder(connections.folder) as folder:
            _begin(folder, written)
            write_secret(connections.job_file, job.model_dump_json(by_alias=True).encode())
            return Prepared(folder=folder.path, num_steps=len(folder.steps()))


def _begin(folder: RunFolder, written: RLHFJob) -> None:
    _refuse_where_another_writes(folder)
    try:
        if folder.begin(written, resume=True, processes=workers_of(written)):
            log.warning("manifest.json could not be read and was replaced by a new one")
    except InvalidRequest as error:
        if error.field != "--out":
            raise
        raise InvalidRequest("spec.storage.runFolder", error.value, error.problem) from None


def _refuse_where_another_writes(folder: RunFolder) -> None:
    """Raise StorageError if a pod of an earlier run still holds the folder's lock."""
    try:
        if folder.path.is_dir():
            os.close(take_lock(folder.path / ".lock"))
    except OSError as error:
        raise StorageError(folder.path, f"{error.strerror}") from error


@contextmanager
def _needs_room(base: Path) -> Iterator[None]:
    """Raise StorageError for a full volume, also in place of errors in the block."""
    _refuse_full(base)
    try:
        yield
    except (OSError, StorageError, InvalidRequest, RuntimeError):  # libraries raise their own
        _refuse_full(base)
        raise


def _refuse_full(base: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=base) as file:
            os.posix_fallocate(file.fileno(), 0, _RUN_FREE_BYTES)
    except OSError as error:
        raise StorageError(base, f"cannot be written: {error.strerror}") from error
