"""End of a process: exit code, last log line, the same line in a pod's status, and last activity.

>>> with Ending() as ending:
...     raise InvalidRequest("spec.model.path", "m", "does not exist")
>>> ending.code, ending.said
(78, "spec.model.path: does not exist (got 'm')")
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from rlhfspec.errors import InvalidRequest, JobError, RewardError, RLHFSpecError, StageFailed, StorageUnavailable
from rlhfspec.stage.logs import without_secrets
from rlhfspec.stage.supervisor import reason_of
from rlhfspec.worker import exits

TERMINATION_LOG = "TERMINATION_LOG"  # environment variable: path for the line
IN_A_POD = "RLHFSPEC_HOST"  # environment variable set in every pod
OF_KUBERNETES = Path("/dev/termination-log")
_MAX_LAST_WORDS_BYTES = 4096  # limit of Kubernetes
_ACTIVITY_BYTES = 1024  # longer texts are cut
log = logging.getLogger("rlhfspec.stage")


class Ending:
    """Context manager that turns an exception into an exit code and a last message. `file` gets a copy of both."""

    def __init__(self) -> None:
        self.code = exits.DONE
        self.said = ""
        self.file: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> bool:
        if isinstance(error, Exception):
            self.failed(error)
        elif error is None and self.said:
            log.info("%s", self.said, extra={"fields": {"exit_code": self.code}})
        if self.said:
            write_last_words(self.said)
        return isinstance(error, Exception)

    def failed(self, error: Exception) -> None:
        cause = error.__cause__ if isinstance(error, StageFailed) and isinstance(error.__cause__, Exception) else error
        if not isinstance(cause, RLHFSpecError):
            log.error("the worker failed with this error", exc_info=cause)
        self.code, self.said = exits.code_of(cause), one_line(cause)
        log.error("%s", self.said, extra={"fields": {"exit_code": self.code}})
        if self.file is not None:
            with suppress(OSError):
                self.file.write_text(json.dumps({"message": without_secrets(self.said), "exit_code": self.code}))


def one_line(error: Exception) -> str:
    """Return an error as one line, prefixed by its kind if storage or a reward failed. A job's problems are joined.

    >>> import errno
    >>> one_line(OSError(errno.ENOSPC, "No space left on device", "/storage/steps.jsonl"))
    "storage full: OSError: [Errno 28] No space left on device: '/storage/steps.jsonl'"
    """
    if isinstance(error, JobError):
        text = "; ".join(str(problem).removeprefix(f"{problem.where}: ") for problem in error.problems)
    else:
        text = str(error) if isinstance(error, InvalidRequest) else reason_of(error)
    return f"{_class(error)}{' '.join(text.split())}"


def _class(error: BaseException) -> str:
    if exits.is_full_disk(error):
        return "storage full: "
    if isinstance(error, StorageUnavailable):
        return "storage away: "
    return "reward failed: " if isinstance(error, RewardError) else ""


def leaves_at_once(when: str) -> None:
    """Write `left: {when}` as last log line, without a logging lock so that signal handlers may call it."""
    text = f"left: {when}"
    os.write(
        sys.stderr.fileno(), json.dumps({"level": "info", "message": text, "exit_code": exits.DONE}).encode() + b"\n"
    )
    write_last_words(text)


def write_last_words(text: str) -> None:
    given = os.environ.get(TERMINATION_LOG)
    if given is None and (IN_A_POD not in os.environ or not OF_KUBERNETES.exists()):
        return
    line = without_secrets(" ".join(text.split())).encode()[:_MAX_LAST_WORDS_BYTES]
    try:
        Path(given or OF_KUBERNETES).write_bytes(line)
    except OSError as error:
        log.warning("the termination message cannot be written: %s", error)


class ActivityFile:
    """File with a process's current activity, readable after the process was killed."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def __call__(self, what: str) -> None:
        """Overwrite the file with the activity in one system call."""
        with suppress(OSError):  # a full disk must not fail the work
            os.pwrite(self._file, what.encode()[:_ACTIVITY_BYTES].ljust(_ACTIVITY_BYTES), 0)


def end_file(path: Path) -> Path:
    """Return the path beside an `ActivityFile` where the process's `Ending` is written."""
    return path.with_suffix(".end")


def last_activity(path: Path) -> str:
    with suppress(OSError):
        return path.read_bytes().decode(errors="replace").strip()
    return ""
