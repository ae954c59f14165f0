"""Checkpoint store of one run. A crash never damages earlier checkpoints."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhfspec.common.folder_lock import take_lock
from rlhfspec.errors import StorageError
from rlhfspec.training.checkpoint.folders import manifest_of, open_checkpoint, read_checkpoint, verify, write_checkpoint
from rlhfspec.training.modeling.tensor_files import sync

log = logging.getLogger(__name__)
_STEP_PREFIX = "step-"
LOCK = ".lock"


class CheckpointStore:
    """Checkpoint folder, locked until it is closed or the process ends."""

    def __init__(self, folder: Path, *, keep: int, verify: Callable[[Path], None] = verify) -> None:
        """Lock the folder. verify: function with which `latest` checks a checkpoint."""
        assert keep >= 1
        self._folder = folder.absolute()
        self._keep = keep
        self._verify = verify
        self._verified: int | None = None  # the step that `latest` found
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self._folder / LOCK)
            self._recover()
        except BlockingIOError as error:
            raise StorageError(folder, str(error.strerror)) from None
        except OSError as error:
            raise StorageError(folder, f"cannot keep checkpoints here: {error}") from error

    def save(self, step: int, state: Mapping[str, Any], *, best: int | None = None) -> Path:
        """Save a checkpoint, then delete the oldest ones.

        state: parts by name, each a nested state or a `Writes`. best: step that is never deleted.
        """
        writing = self._folder / f".writing-{_STEP_PREFIX}{step:08d}"
        try:
            _remove(writing)
            writing.mkdir()
            write_checkpoint(writing, step, state)
            self._put_in_place(writing, step)
        except (OSError, StorageError) as error:
            problem = f"the checkpoint of step {step} could not be written, earlier ones are untouched: {error}"
            raise StorageError(self._folder, problem) from error
        finally:
            shutil.rmtree(writing, ignore_errors=True)
        try:
            self._retire(best)
        except OSError as error:
            raise StorageError(self._folder, f"earlier checkpoints could not be removed: {error}") from error
        return self._path(step)

    def steps(self) -> list[int]:
        names = (path.name.removeprefix(_STEP_PREFIX) for path in self._folder.glob(f"{_STEP_PREFIX}*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def latest(self) -> int | None:
        """Return the newest intact step, or None without checkpoints. Raise StorageError if all are damaged."""
        steps = self.steps()
        for step in reversed(steps):
            try:
                self._verify(self._path(step))
            except StorageError as error:
                log.warning("checkpoint skipped: %s", error)
            else:
                self._verified = step
                return step
        if steps:
            problem = f"all {len(steps)} checkpoints are damaged; remove the folder to begin from the first step"
            raise StorageError(self._folder, problem)
        return None

    def load(self, step: int) -> Any:
        return read_checkpoint(self._path(step))

    def open(self, step: int) -> Any:
        """Return the state with lazy `StoredTensor`s, without rechecking the step that `latest` verified."""
        verified, self._verified = self._verified, None
        return open_checkpoint(self._path(step), is_verified=step == verified)

    def discard_after(self, step: int) -> list[int]:
        later = [other for other in self.steps() if other > step]
        for other in later:
            self._discard(other)
        return later

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _path(self, step: int) -> Path:
        return self._folder / f"{_STEP_PREFIX}{step:08d}"

    def _put_in_place(self, writing: Path, step: int) -> None:
        """Rename a written folder into place. On failure, restore the one that it replaces."""
        aside = self._folder / f".replaced-{_STEP_PREFIX}{step:08d}"
        if self._path(step).exists():
            _remove(aside)
            self._path(step).rename(aside)
        try:
            writing.rename(self._path(step))
            sync(self._folder)
        finally:
            self._settle(aside)

    def _settle(self, aside: Path) -> None:
        home = self._folder / aside.name.removeprefix(".replaced-")
        if home.exists():
            _remove(aside)
        elif aside.exists():
            aside.rename(home)

    def _retire(self, best: int | None) -> None:
        """Delete checkpoints older than the newest `keep` complete ones, except the best."""
        complete = [step for step in self.steps() if self._looks_complete(step)]
        oldest = complete[-self._keep :][0]
        for step in self.steps():
            if step < oldest and step != best:
                self._discard(step)

    def _looks_complete(self, step: int) -> bool:
        """Return whether all files have their expected sizes, because checking digests would be slow."""
        try:
            files = manifest_of(self._path(step))["files"]
            return all((self._path(step) / n).stat().st_size == expected["num_bytes"] for n, expected in files.items())
        except (StorageError, OSError):
            return False

    def _discard(self, step: int) -> None:
        """Rename and then delete a checkpoint, so that an interrupted deletion leaves no damaged one."""
        removing = self._folder / f".removing-{_STEP_PREFIX}{step:08d}"
        _remove(removing)
        self._path(step).rename(removing)
        _remove(removing)

    def _recover(self) -> None:
        """After a crash, restore checkpoints that were being replaced, and remove partial folders."""
        for path in self._folder.glob(f".replaced-{_STEP_PREFIX}*"):
            self._settle(path)
        for pattern in (f".writing-{_STEP_PREFIX}*", f".removing-{_STEP_PREFIX}*"):
            for path in self._folder.glob(pattern):
                _remove(path)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
