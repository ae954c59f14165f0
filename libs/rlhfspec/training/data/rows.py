"""Loading of rows from files, folders or the hub, and held-out splits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhfspec.errors import InvalidRequest, JobError, Problem, first_line
from rlhfspec.job import Dataset, Spec
from rlhfspec.job.file.paths import NOT_ROWS, ROW_SUFFIXES, is_local, resolve
from rlhfspec.training.data.order import permutation
from rlhfspec.training.data.text_files import read_text_rows, unreadable


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    source: str
    records: Sequence[Mapping[str, Any]]
    lines: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.records)

    def where(self, index: int) -> str:
        return f"line {self.lines[index]}" if self.lines else f"row {index + 1}"


def load_rows(dataset: Dataset, base: Path | None = None) -> Rows:
    base = base or Path()
    if not is_local(dataset.path, base):
        return _from_hub(dataset)
    path = Path(resolve(dataset.path, base))
    if not path.exists():
        raise unreadable(path, "no such file or folder")
    if path.is_dir():
        rows = _from_folder(path, dataset)
    elif not path.is_file():
        raise unreadable(path, "must be a regular file; this is a pipe or a device")
    elif path.suffix == ".parquet":
        rows = _from_parquet(path)
    elif path.name.endswith(ROW_SUFFIXES):
        records, lines = read_text_rows(path)
        rows = Rows(source=str(path), records=records, lines=lines)
    else:
        raise unreadable(path, NOT_ROWS)
    if not rows.records:
        raise unreadable(path, "holds no rows")
    return rows


def _from_parquet(path: Path) -> Rows:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise unreadable(path, f"is not a readable Parquet file: {first_line(error)}") from error
    columns = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        with suppress(ValueError, OverflowError):  # Python has no such value (a year 10000), so the column is left out
            columns[name] = column.to_pylist()
    records = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return Rows(source=str(path), records=records)


def _from_folder(path: Path, dataset: Dataset) -> Rows:
    import datasets

    if not (path / "dataset_info.json").exists() and not (path / "dataset_dict.json").exists():
        inside = ", ".join(sorted(child.name for child in path.iterdir())[:5]) or "nothing"
        raise unreadable(path, f"was not written by datasets' save_to_disk (it holds {inside}); name a file in it")
    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise unreadable(path, f"cannot be read: {first_line(error)}") from error
    return Rows(source=str(path), records=_split(loaded, dataset, str(path)))


def _from_hub(dataset: Dataset) -> Rows:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError

    try:
        loaded = datasets.load_dataset(dataset.path)
    except (OSError, ValueError, HfHubHTTPError) as error:
        problem = f"neither a file beside the job nor a hub dataset that can be loaded: {first_line(error)}"
        raise unreadable(dataset.path, problem) from error
    return Rows(source=dataset.path, records=_split(loaded, dataset, dataset.path))


def _split(loaded: Any, dataset: Dataset, source: str) -> Any:
    if not isinstance(loaded, dict):
        return _without_media(loaded)
    if dataset.split not in loaded:
        known = ", ".join(loaded)
        raise JobError(
            source, [Problem(field="spec.dataset.split", value=dataset.split, problem=f"must be one of {known}")]
        )
    return _without_media(loaded[dataset.split])


def _without_media(rows: Any) -> Any:
    """Drop image and audio columns, which would be decoded with every row."""
    return rows.remove_columns([name for name, kind in rows.features.items() if hasattr(kind, "decode_example")])


def held_out_of(rows: Rows, spec: Spec, base_folder: Path) -> tuple[Rows, Rows]:
    assert spec.evaluation is not None
    if spec.evaluation.path is not None:
        return rows, load_rows(spec.dataset.model_copy(update={"path": spec.evaluation.path}), base_folder)
    count = spec.evaluation.num_prompts
    if count >= len(rows):
        problem = f"must be < {len(rows)}, the rows of the dataset they are taken from; or set evaluation.path"
        raise InvalidRequest("spec.evaluation.numPrompts", count, problem)
    return split(rows, count, spec.training.seed)


def split(rows: Rows, count: int, seed: int) -> tuple[Rows, Rows]:
    """Return the remaining rows, and `count` rows chosen by seed, both in the dataset's order."""
    taken = set(permutation(seed, "held-out", len(rows))[:count].tolist())
    kept = [index for index in range(len(rows)) if index not in taken]
    return _some(rows, kept), _some(rows, sorted(taken))


def _some(rows: Rows, indices: Sequence[int]) -> Rows:
    return Rows(
        source=rows.source,
        records=[rows.records[index] for index in indices],
        lines=[rows.lines[index] for index in indices] if rows.lines else (),
    )
