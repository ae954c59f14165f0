"""Rows of JSON lines, JSON list and CSV files, optionally gzipped."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhfspec.errors import JobError, Problem

_DATASET_FIELD = "spec.dataset.path"
MOST_PROBLEMS = 10  # further ones are only counted
Found = tuple[int, Mapping[str, Any] | ValueError]  # a row's line, and the row or its error


def read_text_rows(path: Path) -> tuple[list[Mapping[str, Any]], list[int]]:
    """Return rows and their line numbers (none for a JSON list). Raise JobError, naming malformed rows."""
    data = _bytes(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    unit = "row" if suffix == ".json" and data.lstrip()[:1] == b"[" else "line"
    try:
        if suffix == ".csv":
            rows = list(_csv_rows(data))
        elif unit == "row":
            rows = [(number, _tried(_object, value)) for number, value in enumerate(_json(data), start=1)]
        else:
            lines = enumerate(data.split(b"\n"), start=1)
            rows = [(number, _tried(lambda line: _object(_json(line)), line)) for number, line in lines if line.strip()]
    except ValueError as error:  # the whole file is malformed
        raise unreadable(path, str(error)) from error
    problems = [
        Problem(field=_DATASET_FIELD, problem=str(row), where=f"{unit} {number}")
        for number, row in rows
        if isinstance(row, ValueError)
    ]
    if problems:
        raise JobError(str(path), at_most(problems))
    numbers = [number for number, _ in rows] if unit == "line" else []
    return [row for _, row in rows if not isinstance(row, ValueError)], numbers


def _tried(read: Callable[[Any], Mapping[str, Any]], value: Any) -> Mapping[str, Any] | ValueError:
    try:
        return read(value)
    except ValueError as error:
        return error


def _json(data: bytes) -> Any:
    try:
        return json.loads(data.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"must be UTF-8 text (byte {error.start + 1} of the line is not)") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"is not JSON: {error.msg} at {line}column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


def _object(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f'must be an object such as {{"prompt": "..."}}, not a {type(value).__name__}')
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number; write null, or leave it out")


def _csv_rows(data: bytes) -> Iterator[Found]:
    """Yield each row with its last line number, because quoted text may span lines."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(f"must be UTF-8 text (line {line} is not)") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(reader, [])
        if "" in header or len(set(header)) < len(header):
            raise ValueError(f"its first line must name every column once; it says {', '.join(header)}")
        for row in reader:
            wrong = ValueError(f"has {len(row)} values, and the first line names {len(header)} columns")
            if row:
                yield reader.line_num, dict(zip(header, row, strict=True)) if len(row) == len(header) else wrong
    except csv.Error as error:
        raise ValueError(f"is not CSV: {error}, in line {reader.line_num}") from error


def _bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise unreadable(path, f"is not a complete gzip file: {error}") from error
    except OSError as error:
        raise unreadable(path, f"cannot be read: {error.strerror}") from error
    return data.removeprefix(b"\xef\xbb\xbf")


def at_most(problems: list[Problem]) -> list[Problem]:
    rest = len(problems) - MOST_PROBLEMS
    if rest <= 0:
        return problems
    return [*problems[:MOST_PROBLEMS], Problem(field=problems[0].field, problem=f"and {rest} more rows like these")]


def unreadable(source: object, problem: str) -> JobError:
    return JobError(str(source), [Problem(field=_DATASET_FIELD, problem=problem)])
