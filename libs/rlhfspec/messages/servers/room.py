"""Checks for free disk and memory before a run starts."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

from rlhfspec.errors import StorageError

SERVERS_BYTES = 8 << 20  # for NATS, keys and logs together


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def refuse_full_disk(folder: Path, num_bytes: int, what: str) -> None:
    """Raise StorageError, naming `what`, unless the bytes can be allocated in the folder; free space ignores quotas."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(folder, f"cannot be written: {error.strerror}") from error
        left = f"{_megabytes(free_bytes(folder))} are free"
        raise StorageError(folder, f"disk full: {what} need {_megabytes(num_bytes)}, and {left}") from error


def place_of_weights(memory: Path, disk: Path, num_bytes: int) -> tuple[Path, str]:
    """Return the folder for the weights: `memory` and "" if they fit, else one on `disk` and a message about it."""
    free = free_bytes(memory)
    if num_bytes <= free:
        return memory, ""
    refuse_full_disk(disk, num_bytes, "the job's weights")
    return disk / "weights", (
        f"{memory.parent} has {_megabytes(free)} free, but the job's weights need {_megabytes(num_bytes)}: "
        f"using {disk} instead"
    )


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 10e6 else f"{num_bytes / 1e6:,.0f} MB"
