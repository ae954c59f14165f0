"""JSON log lines with run, worker and sample; secrets are masked.

Example:
    >>> import io
    >>> stream = io.StringIO()
    >>> with configure(job="sums", run="3f2a", stage="reward", worker=0, stream=stream), about("sums/3/7/1"):
    ...     logging.getLogger("rlhfspec.stage").warning("no answer from %s", "http://me:hunter2@judge.example")
    >>> line = json.loads(stream.getvalue())
    >>> line["message"], line["stage"], line["worker"], line["sample"]
    ('no answer from http://...@judge.example', 'reward', 0, 'sums/3/7/1')
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO

from rlhfspec.common.context import holding

_CURRENT_SAMPLE: ContextVar[str] = ContextVar("sample", default="")
_SECRETS = (
    (re.compile(r"\bS[A-Z2-7]{50,}"), "S..."),  # NKEY seeds
    (re.compile(r"(\w://)[^\s/@]+@"), r"\1...@"),  # user and password of a URL
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), "..."),
    (re.compile(r"(?i)(bearer |password['\"]?\s*[:=]\s*['\"]?)[^\s'\",]+"), r"\1..."),
)
# Frequent messages of libraries that call for no action.
_NOISE = (
    re.compile(r"returning true from eof_received\(\) has no effect when using ssl"),
    re.compile(r"SSL connection is closed|SSL error in data received"),
)


def about(sample: str) -> AbstractContextManager[None]:
    return holding(_CURRENT_SAMPLE, sample)


@contextmanager
def configure(*, job: str, run: str, stage: str, worker: int, stream: TextIO | None = None) -> Iterator[None]:
    """Log to `stream` as JSON inside the block, Python warnings included."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_AsJson({"job": job, "run": run, "stage": stage, "worker": worker}))
    handler.addFilter(_is_worth_a_line)
    root, ours = logging.getLogger(), logging.getLogger("rlhfspec")
    before = (root.handlers, root.level, ours.level)
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    ours.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.handlers, root_level, our_level = before
        root.setLevel(root_level)
        ours.setLevel(our_level)


def without_secrets(text: str) -> str:
    """Mask key seeds and passwords.

    >>> without_secrets("nats://reward:hunter2@127.0.0.1:4222 refused")
    'nats://...@127.0.0.1:4222 refused'
    """
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    if record.levelno >= logging.ERROR and record.name.startswith("rlhfspec"):
        return True
    message = record.getMessage()
    return not any(noise.search(message) for noise in _NOISE)


class _AsJson(logging.Formatter):
    def __init__(self, where: dict[str, Any]) -> None:
        super().__init__()
        self._where = where

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": when.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "message": without_secrets(record.getMessage()),
            "logger": record.name,
            **self._where,
            **getattr(record, "fields", {}),  # of `extra`
        }
        if sample := _CURRENT_SAMPLE.get():
            line["sample"] = without_secrets(sample)
        if record.exc_info and (error := record.exc_info[1]) is not None:
            reason = "".join(traceback.format_exception_only(error))
            line["error"] = without_secrets(" ".join(reason.split()))
            line["traceback"] = without_secrets("".join(traceback.format_exception(error)))
        return json.dumps(line, ensure_ascii=False)
