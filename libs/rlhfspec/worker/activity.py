"""What a process is at, in a file that outlives it: so that its death names the sample, however sudden it was.

Example:
    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "reward-0"
    >>> note = ActivityFile(path)
    >>> note("scoring sums/3/7/1 with source digits"); last_activity(path)
    'scoring sums/3/7/1 with source digits'
    >>> note(""); last_activity(path)
    ''
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_SIZE = 1024  # bytes; of more, the beginning


class ActivityFile:
    """Called with what the process does now; empty: it waits."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def __call__(self, what: str) -> None:
        """One call of the system: what the file holds is all old or all new."""
        with suppress(OSError):  # no room; nothing else may fail for it
            os.pwrite(self._file, what.encode()[:_SIZE].ljust(_SIZE), 0)


def end_file(path: Path) -> Path:
    """Beside it: how the process ended, in its own words (`last_words.Ending`)."""
    return path.with_suffix(".end")


def last_activity(path: Path) -> str:
    """Empty: it waited, or never said anything."""
    with suppress(OSError):
        return path.read_bytes().decode(errors="replace").strip()
    return ""
