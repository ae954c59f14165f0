"""File with a process's current activity, which outlives the process, so that a sudden death can name the sample."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_SIZE = 1024  # bytes; longer texts are cut


class ActivityFile:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def __call__(self, what: str) -> None:
        """Replace the activity with a single system call, so that a reader sees the old or the new text."""
        with suppress(OSError):  # a full disk must not fail the work
            os.pwrite(self._file, what.encode()[:_SIZE].ljust(_SIZE), 0)


def end_file(path: Path) -> Path:
    """Return the file beside it in which the process records how it ended (`last_words.Ending`)."""
    return path.with_suffix(".end")


def last_activity(path: Path) -> str:
    with suppress(OSError):
        return path.read_bytes().decode(errors="replace").strip()
    return ""
