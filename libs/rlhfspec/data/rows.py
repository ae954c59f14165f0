"""Where rows come from: JSON lines, Parquet, a `datasets` folder or a hub id. What is malformed is named by its line.

Example:
    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp()) / "sums.jsonl"
    >>> _ = file.write_text('{"prompt": "1+1=", "answer": "2"}\\n')
    >>> rows = load_rows(Dataset(path=str(file)))
    >>> rows.records[0]["answer"], rows.where(0)
    ('2', 'line 1')
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfspec.errors import JobError, Problem
from rlhfspec.job import Dataset
from rlhfspec.job_file.paths import is_local, resolve

FIELD = "spec.dataset.path"
MOST_PROBLEMS = 10  # of one kind of file, then the rest is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """records: one mapping a row. lines: where each stands in its file; empty when rows have no lines."""

    source: str
    records: Sequence[Mapping[str, Any]]
    lines: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.records)

    def where(self, index: int) -> str:
        return f"line {self.lines[index]}" if self.lines else f"row {index + 1}"


def load_rows(dataset: Dataset, base: Path | None = None) -> Rows:
    """All rows; relative paths start at `base`, the job file's folder (`read_job` has made them absolute already)."""
    base = base or Path()
    if not is_local(dataset.path, base):
        return _from_hub(dataset)
    path = Path(resolve(dataset.path, base))
    if not path.exists():
        raise _error(str(path), "no such file or folder")
    if path.is_dir():
        rows = _from_folder(path, dataset)
    elif path.suffix == ".jsonl":
        rows = _from_json_lines(path)
    elif path.suffix == ".parquet":
        rows = _from_parquet(path)
    else:
        raise _error(str(path), "must be a .jsonl or .parquet file, or a folder written by datasets' save_to_disk")
    if not rows.records:
        raise _error(str(path), "holds no rows")
    return rows


def _from_json_lines(path: Path) -> Rows:
    records: list[Mapping[str, Any]] = []
    lines: list[int] = []
    problems: list[Problem] = []
    for number, line in enumerate(_bytes(path).removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(_json_object(line))
            lines.append(number)
        except ValueError as error:
            problems.append(Problem(field=FIELD, problem=str(error), where=f"line {number}"))
    if problems:
        raise JobError(str(path), at_most(problems))
    return Rows(source=str(path), records=records, lines=lines)


def _json_object(line: bytes) -> dict[str, Any]:
    """One row, or a ValueError that says what the line is instead."""
    try:
        value = json.loads(line.decode(), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ValueError(f"must be UTF-8 text (byte {error.start + 1} of the line is not)") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f'must be an object such as {{"prompt": "..."}}, not a {type(value).__name__}')
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number; write null, or leave it out")


def _from_parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        return Rows(source=str(path), records=pyarrow.parquet.read_table(path).to_pylist())
    except (pyarrow.ArrowException, OSError) as error:
        raise _error(str(path), f"is not a readable Parquet file: {_first_line(error)}") from error


def _from_folder(path: Path, dataset: Dataset) -> Rows:
    import datasets

    if not (path / "dataset_info.json").exists() and not (path / "dataset_dict.json").exists():
        inside = ", ".join(sorted(child.name for child in path.iterdir())[:5]) or "nothing"
        raise _error(str(path), f"was not written by datasets' save_to_disk (it holds {inside}); name a file in it")
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise _error(str(path), f"cannot be read: {_first_line(error)}") from error
    return Rows(source=str(path), records=_split(loaded, dataset, str(path)))


def _from_hub(dataset: Dataset) -> Rows:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    try:
        loaded = datasets.load_dataset(dataset.path)
    except (OSError, ValueError, HfHubHTTPError) as error:
        problem = f"neither a file beside the job nor a hub dataset that can be had: {_first_line(error)}"
        raise _error(dataset.path, problem) from error
    return Rows(source=dataset.path, records=_split(loaded, dataset, dataset.path))


def _split(loaded: Any, dataset: Dataset, source: str) -> Any:
    """One split of a DatasetDict; a plain Dataset is the split."""
    if not isinstance(loaded, dict):
        return loaded
    if dataset.split not in loaded:
        known = ", ".join(loaded)
        raise JobError(
            source, [Problem(field="spec.dataset.split", value=dataset.split, problem=f"must be one of {known}")]
        )
    return loaded[dataset.split]


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _error(str(path), f"cannot be read: {error.strerror}") from error


def at_most(problems: list[Problem]) -> list[Problem]:
    """The first few; the last line counts the rest."""
    rest = len(problems) - MOST_PROBLEMS
    if rest <= 0:
        return problems
    return [*problems[:MOST_PROBLEMS], Problem(field=problems[0].field, problem=f"and {rest} more rows like these")]


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _error(source: str, problem: str) -> JobError:
    return JobError(source, [Problem(field=FIELD, problem=problem)])
