"""Lock of a folder that one process at a time writes."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def take_lock(path: Path, *, wait: bool = False) -> int:
    """Lock a file until the returned descriptor is closed. Without `wait`, raise BlockingIOError if it is locked."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise BlockingIOError(errno.EAGAIN, f"another run is writing here (process {holder})") from None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for the file's lock, and hold it inside this context."""
    lock = take_lock(path, wait=True)
    try:
        yield
    finally:
        os.close(lock)
