"""Is there room on the disk and in memory for what a run is about to put there? Asked before anything is started."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from rlhfspec.errors import StorageError

SERVERS_BYTES = 8 << 20  # what NATS and the run's keys and logs take at once


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def refuse_full_disk(folder: Path, num_bytes: int, what: str) -> None:
    """By taking so much room for a moment: what is free says nothing of quotas."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(folder, f"cannot be written: {error.strerror}") from error
        left = f"{_megabytes(free_bytes(folder))} are free"
        raise StorageError(folder, f"disk full: {what} need {_megabytes(num_bytes)}, and {left}") from error


def place_of_weights(memory: Path, disk: Path, num_bytes: int) -> tuple[Path, str]:
    """In memory where they fit, else on the disk; and what to tell about that."""
    free = free_bytes(memory)
    if num_bytes <= free:
        return memory, ""
    refuse_full_disk(disk, num_bytes, "the job's weights")
    return disk / "weights", (
        f"{memory.parent} has {_megabytes(free)} free, and the job's weights need {_megabytes(num_bytes)}: "
        f"they go through {disk}"
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 10e6 else f"{num_bytes / 1e6:,.0f} MB"
