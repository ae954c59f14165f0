"""Scratch folders of a run, and the cleanup of those of dead runs.

`/dev/shm/rlhfspec-UID` (or a temporary folder) holds weights and files that need short paths; `RUN/processes` holds
keys, server data and addresses. The run, its guardians or this user's next run removes both. A folder with a free lock
belongs to a dead run.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlhfspec.common.folder_lock import take_lock
from rlhfspec.errors import StorageError
from rlhfspec.messages.servers.guardian import UID, end_run, guardians_of

SHARED_MEMORY = Path("/dev/shm")
_SCRATCH_PREFIX = "rlhfspec-"
PROCESSES = "processes"  # in a run's folder
GUARDIANS_SECONDS = 90.0  # deadline for the guardians of a dead run to finish
_PLACE, _LOCK = "place", ".lock"
_POLL_GUARDIANS_SECONDS = 0.02


class Scratch:
    """Scratch folders of a run: RUN/processes, and the first usable of `paths`."""

    def __init__(self, uid: str, place: Path) -> None:
        self._uid = uid
        self._path: Path | None = None  # None until it is made, so that nothing else is removed
        self.paths = [parent / f"{_SCRATCH_PREFIX}{uid}" for parent in _parents()]
        self._place = place.absolute()
        self.beginning = self._place.with_name(f".{PROCESSES}-{uid}")
        self._lock: int | None = None

    @property
    def path(self) -> Path:
        assert self._path is not None, "it was made"
        return self._path

    def make(self) -> None:
        """Make both folders; RUN/processes appears with its uid inside, so that no dead run's guardian removes it."""
        self.beginning.mkdir(mode=0o700)
        (self.beginning / UID).write_text(self._uid)
        self.beginning.rename(self._place)
        problems = []
        for path in self.paths:
            try:
                path.mkdir(mode=0o700)
                self._path = path
                self._lock = take_lock(path / _LOCK)
                (path / _PLACE).write_text(str(self._place))  # last, so that its readers find the lock held
            except OSError as error:
                problems.append(f"{path} cannot be made: {error.strerror}")
                self.remove()
            else:
                return
        nowhere = f"neither {SHARED_MEMORY} nor a folder for temporary files can be written"
        raise StorageError("the run's memory", "; ".join(problems) or nowhere)

    def remove(self) -> None:
        if self._path is not None:
            shutil.rmtree(self._path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def end_dead_runs() -> list[str]:
    """Clean up runs whose supervisor and guardians died together, and return their uids."""
    return [path.name.removeprefix(_SCRATCH_PREFIX) for path in _scratch_folders() if _end_if_dead(path)]


def end_run_in(place: Path) -> None:
    """End a dead run's processes and remove RUN/processes; the caller holds the run folder's lock."""
    with suppress(OSError):
        uid = (place / UID).read_text()
        end_run(uid, [])
        _wait_for_guardians(uid)
    shutil.rmtree(place, ignore_errors=True)


def _wait_for_guardians(uid: str) -> None:
    end = time.monotonic() + GUARDIANS_SECONDS
    while guardians_of(uid) and time.monotonic() < end:
        time.sleep(_POLL_GUARDIANS_SECONDS)


def _parents() -> list[Path]:
    found = [SHARED_MEMORY] if os.access(SHARED_MEMORY, os.W_OK) else []
    with suppress(OSError):
        found.append(Path(tempfile.gettempdir()))
    return found


def _scratch_folders() -> Iterator[Path]:
    """Yield scratch folders that only this user can write; others are not trusted."""
    for path in [path for parent in _parents() for path in parent.glob(f"{_SCRATCH_PREFIX}*")]:
        with suppress(OSError):
            found = path.lstat()
            is_mine = found.st_uid == os.getuid() and stat.S_IMODE(found.st_mode) == 0o700
            if is_mine and stat.S_ISDIR(found.st_mode) and (path / _PLACE).is_file():
                yield path


def _end_if_dead(path: Path) -> bool:
    try:
        lock = take_lock(path / _LOCK)
    except OSError:  # it lives
        return False
    try:
        uid = path.name.removeprefix(_SCRATCH_PREFIX)
        _wait_for_guardians(uid)
        place = Path((path / _PLACE).read_text())
        end_run(uid, [path])
        if place.name == PROCESSES:
            _remove_place(place)
    except OSError:  # its guardian was faster
        return False
    finally:
        os.close(lock)
    return True


def _remove_place(place: Path) -> None:
    """Remove RUN/processes, unless another run uses the folder now."""
    if place.is_dir():
        with suppress(OSError):
            lock = take_lock(place.parent / _LOCK)
            shutil.rmtree(place, ignore_errors=True)
            os.close(lock)
