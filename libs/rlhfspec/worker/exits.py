"""Exit codes of a worker process, with the failure class of each.

>>> from rlhfspec.errors import InvalidRequest, TransportClosed
>>> code_of(InvalidRequest("spec.model.path", "m", "does not exist")), code_of(TransportClosed("rlhf.sums"))
(78, 75)
>>> failure_of(-9), failure_of(78), failure_of(1)
('killed', 'permanent', 'error')
"""

from __future__ import annotations

import errno
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rlhfspec.errors import (
    InvalidRequest,
    LogProbMismatch,
    NumericalError,
    RewardError,
    RolloutError,
    StorageUnavailable,
    TransportClosed,
    TransportFull,
    TransportUnavailable,
)

Failure = Literal["error", "temporary", "killed", "permanent"]

DONE = 0  # its work is done, or it was asked to leave
ERROR = 1
TEMPORARY = 75  # EX_TEMPFAIL: a server is unreachable for now
PERMANENT = 78  # EX_CONFIG: a restart would fail again
_TEMPORARY = (
    TransportClosed, TransportFull, TransportUnavailable, StorageUnavailable, ConnectionError, TimeoutError,
)  # fmt: skip
_PERMANENT = (InvalidRequest, LogProbMismatch, RewardError, NumericalError, RolloutError)
# Crashes of the process itself: no other program sends these signals.
_CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}


def code_of(error: BaseException) -> int:
    if isinstance(error, _PERMANENT):
        return PERMANENT
    return TEMPORARY if isinstance(error, _TEMPORARY) else ERROR


def is_full_disk(error: BaseException | None) -> bool:
    """Return whether an error or its cause reports a full disk or quota, by errno or text."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if is_about_full_disk(str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_about_full_disk(text: str) -> bool:
    """Return whether a message reports a full disk or quota.

    >>> is_about_full_disk("OSError: [Errno 28] No space left on device: 'w.safetensors'")
    True
    """
    words = f"{re.escape(os.strerror(errno.ENOSPC))}|{re.escape(os.strerror(errno.EDQUOT))}|Errno (28|122)\\b"
    return re.search(words, text, re.IGNORECASE) is not None


def failure_of(code: int) -> Failure:
    """Return the failure class of an exit code, or of a signal if negative."""
    if code < 0:
        return "error" if -code in _CRASHES else "killed"
    return "permanent" if code == PERMANENT else "temporary" if code == TEMPORARY else "error"


def num_killed_for_memory(counters: Path = Path("/proc/vmstat")) -> int:
    """Return the machine's OOM kills since boot, or 0 if unknown."""
    with suppress(OSError):
        if found := re.search(r"^oom_kill (\d+)$", counters.read_text(), re.MULTILINE):
            return int(found[1])
    return 0


def said(code: int) -> str:
    """Return how a process with this exit code ended.

    >>> said(-9), said(3)
    ('killed by SIGKILL', 'ended with exit code 3')
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
