"""Lock-free, read-only access to a run folder during the run: curves, moves, samples and traces.

>>> from rlhfspec.messages.records.metrics import example_step
>>> row_of(example_step(step=3).to_line())[:4]
[3, 1700000015.8, 0.5, 0.176777]
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.runs.folder.moves import read_moves
from rlhfspec.runs.view.learning_signs import DISTINCT, NUM_STEPS, collapse_of, nothing_learnt
from rlhfspec.runs.view.text import visible
from rlhfspec.runs.view.waterfall import by_whom, notes, pieces
from rlhfspec.telemetry.read import Life, life_of

_TEXT_CHARACTERS = 20_000  # of a text shown in full
HEAD_CHARACTERS = 240  # of one in a list
MOST_LISTED = 25
MOST_LINE_BYTES = 16 << 20  # a longer line is not a sample
REMEMBERED_BYTES = 64

# Curves by name, with their path in a line of steps.jsonl.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "step": ("step",),
    "at": ("finished_unix_seconds",),
    "reward": ("reward", "mean"),
    "reward_std": ("reward", "std"),
    "kl": ("kl", "k3"),
    "entropy": ("entropy",),
    "equal_groups": ("equal_reward_groups",),
    "distinct": ("learning", DISTINCT),
    "prompts": ("num_prompts",),
    "policy_loss": ("policy_loss",),
    "value_loss": ("value_loss",),
    "tokens_per_second": ("tokens_per_second",),
    "accepted": ("accepted_per_verification",),
    "length_mean": ("response_length", "mean"),
    "length_p50": ("response_length", "p50"),
    "length_p95": ("response_length", "p95"),
    "seconds": ("seconds", "step"),
    "samples": ("num_samples",),
}
Row = list[float | None]
PLACE_OF = {name: place for place, name in enumerate(COLUMNS)}


def row_of(line: str | bytes) -> Row | None:
    """Return the values of COLUMNS in a line of steps.jsonl, or None if it is damaged."""
    try:
        content = json.loads(line)
    except ValueError:
        return None
    row = [_number(content, path) for path in COLUMNS.values()]
    return row if row[0] is not None else None


def warning_of_rows(rows: Mapping[int, Row], evaluations: Mapping[int, Evaluation]) -> str:
    """Return a warning of collapse, else of equal rewards in the last steps, else ""."""
    last = [rows[step] for step in sorted(rows)[-NUM_STEPS:]]
    groups = [(row[PLACE_OF["equal_groups"]], row[PLACE_OF["prompts"]]) for row in last]
    made = [evaluations[step] for step in sorted(evaluations) if step <= max(rows, default=0)]  # since the last resume
    return collapse_of(made) or nothing_learnt(groups)


def _number(content: Any, path: tuple[str, ...]) -> float | None:
    for key in path:
        content = content.get(key) if isinstance(content, dict) else None
    if isinstance(content, bool) or not isinstance(content, int | float) or not math.isfinite(content):
        return None
    if path == ("finished_unix_seconds",):
        return round(content, 1)
    return content if isinstance(content, int) else float(f"{content:.6g}")


class NewLines:
    """Reader of complete lines appended since the last `read`. Truncated or replaced files are reread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_restarts = 0
        self._offset = 0
        self._before = b""  # last bytes read; if they changed, this is another file

    def read(self) -> Iterator[tuple[int, bytes]]:
        try:
            with plain_file(self.path) as file:
                if not self._goes_on(file):
                    self.num_restarts += 1
                    self._offset, self._before = 0, b""
                file.seek(self._offset)
                while (line := file.readline(MOST_LINE_BYTES)).endswith(b"\n"):
                    begin, self._offset = self._offset, self._offset + len(line)
                    self._before = (self._before + line)[-REMEMBERED_BYTES:]
                    yield begin, line
        except FileNotFoundError:
            if self._offset:
                self.num_restarts += 1
            self._offset, self._before = 0, b""

    def _goes_on(self, file: Any) -> bool:
        file.seek(self._offset - len(self._before))
        return bool(file.read(len(self._before)) == self._before)


def plain_file(path: Path) -> BinaryIO:
    """Open a regular file. Raise StorageError for links and pipes, which pods may plant, and unreadable files."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(path, f"cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise StorageError(path, "is not a regular file")
    return os.fdopen(file, "rb")


_SAMPLE_HEAD = re.compile(rb'\{"id": ("(?:[^"\\]|\\.)*"), "step": (-?\d+),')


@dataclass(slots=True)
class _IndexedStep:
    begin: int
    end: int
    num_samples: int


class Samples:
    def __init__(self, run: Path) -> None:
        self._lines = NewLines(run / "samples.jsonl")
        self._steps: dict[int, _IndexedStep] = {}
        self._restarts = 0

    def steps(self) -> list[tuple[int, int]]:
        self._look()
        return [(step, where.num_samples) for step, where in sorted(self._steps.items(), reverse=True)]

    def of_step(self, step: int, *, skip: int = 0) -> list[dict[str, Any]]:
        found = []
        for place, line in enumerate(self._read(step)):
            if place >= skip and (sample := _sample_of(line, HEAD_CHARACTERS)) is not None:
                found.append(sample)
            if len(found) == MOST_LISTED:
                break
        return found

    def sample(self, id: str) -> dict[str, Any]:
        parts = id.split("/")
        if len(parts) == 4 and re.fullmatch(r"\d{1,9}", parts[1]):
            for line in self._read(int(parts[1])):
                head = _SAMPLE_HEAD.match(line)
                if head is not None and json.loads(head[1]) == id and (sample := _sample_of(line, _TEXT_CHARACTERS)):
                    return sample
        raise InvalidRequest(
            "sample", id[:200], "is not in samples.jsonl, which lists samples once they were trained on"
        )

    def _look(self) -> None:
        for begin, line in self._lines.read():
            if self._lines.num_restarts != self._restarts:
                self._restarts = self._lines.num_restarts
                self._steps.clear()
            if (head := _SAMPLE_HEAD.match(line)) is not None:
                where = self._steps.setdefault(int(head[2]), _IndexedStep(begin, begin, 0))
                where.end = begin + len(line)
                where.num_samples += 1

    def _read(self, step: int) -> Iterator[bytes]:
        self._look()
        where = self._steps.get(step)
        if where is None:
            return
        with plain_file(self._lines.path) as file:
            file.seek(where.begin)
            while file.tell() < where.end:
                yield file.readline(MOST_LINE_BYTES)


def _sample_of(line: bytes, most: int) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
        return {
            "id": str(content["id"]),
            "step": int(content["step"]),
            "prompt": shown(str(content["prompt"]), most),
            "text": shown(str(content["text"]), most),
            "num_characters": len(content["text"]),
            "num_tokens": len(content["tokens"]),
            "reward": content["reward"],
            "components": dict(content["components"]),
            "weights_version": content["weights_version"],
            "finish_reason": str(content["finish_reason"]),
            "error": shown(str(content["error"]), 1000),
        }
    except (ValueError, KeyError, TypeError):
        return None


def shown(text: str, most: int) -> str:
    r"""Return untrusted text with visible control characters, cut to `most` characters.

    >>> shown("a\x00b\u202ec", 3)
    'a␀b…'
    """
    return visible(text[:most]) + ("…" if len(text) > most else "")


@dataclass(slots=True)
class Changes:
    """Changes in a run folder. `anew`: earlier data is invalid, because the run resumed from a checkpoint."""

    rows: list[Row] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    moves: list[dict[str, Any]] = field(default_factory=list)
    anew: bool = False


class RunReader:
    """Reader of one run folder, for one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = Samples(path)
        self._steps = NewLines(path / "steps.jsonl")
        self._evaluations = NewLines(path / "evaluations.jsonl")
        self._moves_offset = 0

    def changes(self) -> Changes:
        before = self._steps.num_restarts
        rows = [row for _, line in self._steps.read() if (row := row_of(line)) is not None]
        return Changes(rows, list(self._new_evaluations()), list(self._new_moves()), self._steps.num_restarts != before)

    def _new_evaluations(self) -> Iterator[Evaluation]:
        for _, line in self._evaluations.read():
            with suppress(InvalidRequest):  # a damaged line
                yield Evaluation.from_line(line.decode(errors="replace"))

    def _new_moves(self) -> Iterator[dict[str, Any]]:
        try:
            for content, offset in read_moves(self.path, offset=self._moves_offset):
                self._moves_offset = offset
                if content["kind"] == "moved":
                    yield content
        except OSError:
            self._moves_offset = 0

    def everything_of(self, sample: str) -> dict[str, Any]:
        """Return a sample's text and trace; `missing` lists why either is absent."""
        found: dict[str, Any] = {"missing": []}
        for name, look in (("sample", self.samples.sample), ("trace", self.life)):
            try:
                found[name] = look(sample)
            except InvalidRequest as error:
                found["missing"].append(f"{name}: {error.problem}")
        return found

    def life(self, sample: str) -> dict[str, Any]:
        return life_content(life_of(self.path, sample))


def life_content(life: Life) -> dict[str, Any]:
    """Return a sample's trace in seconds since its start. Each piece of a span is (style, begin, end)."""
    return {
        "sample": life.sample,
        "began": life.began,
        "seconds": life.ended - life.began,
        "spans": [
            {
                "name": span.name,
                "by": by_whom(span),
                "pieces": [(mark, start - life.began, end - life.began) for mark, start, end in pieces(life, span)],
                "notes": list(notes(life, span)),
                "id": span.id,
            }
            for span in life.spans
        ],
        "trace": life.spans[0].trace,
    }


def move_content(moved: Any, at: float) -> dict[str, Any]:
    return {"kind": "moved", "at": round(at, 3), **asdict(moved)}
