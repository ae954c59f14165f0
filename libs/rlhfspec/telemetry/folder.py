"""Spans in the run folder: `traces/STAGE-N.jsonl`, one line each. If writing fails, the run continues."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from rlhfspec.telemetry.spans import Span

TRACES = "traces"
FLUSH_SECONDS = 1.0
log = logging.getLogger("rlhfspec.telemetry")


class SpanFiles:
    """Span writer of one process. `keep` is thread-safe."""

    def __init__(self, run: Path) -> None:
        self._folder = run / TRACES
        self._spans: deque[Span] = deque()
        self._closing = threading.Event()
        self._broken = False
        self._thread = threading.Thread(target=self._write_on, name="traces", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closing.set()
        self._thread.join()

    def keep(self, span: Span) -> None:
        if not self._broken:
            self._spans.append(span)

    def _write_on(self) -> None:
        try:
            while not self._closing.wait(FLUSH_SECONDS):
                self._flush()
            self._flush()
        except OSError as error:
            log.warning("traces are no longer written: %s: %s", self._folder, error.strerror)
            self._broken = True
            self._spans.clear()

    def _flush(self) -> None:
        by_file: dict[Path, list[str]] = {}
        while self._spans:
            span = self._spans.popleft()
            path = self._folder / f"{span.stage}-{span.worker}.jsonl"
            by_file.setdefault(path, []).append(span.to_line())
        for path, lines in by_file.items():
            append_lines(path, lines)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines, after ending a line that was left incomplete."""
    path.parent.mkdir(exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
        is_at_a_line = file.read() in (b"", b"\n")
        file.write("".join(lines if is_at_a_line else ["\n", *lines]).encode())


def read_spans(run: Path, *, containing: str = "") -> Iterator[Span]:
    """Yield the spans of all processes, unordered, from complete lines that contain this text."""
    wanted = containing.encode()
    for path in sorted((run / TRACES).glob("*.jsonl")):
        with path.open("rb") as file:
            for line in file:
                if wanted in line and (span := _parsed(line)) is not None:
                    yield span


def _parsed(line: bytes) -> Span | None:
    try:
        return Span.from_line(line.decode())
    except ValueError:
        return None
