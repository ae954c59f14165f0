"""Columns of dataset rows as JSON for rewards: dates in ISO format, decimals as text, no bytes or images.

>>> from datetime import date
>>> columns_of({"prompt": "1+1=", "day": date(2030, 1, 2), "image": b"PNG"}, Dataset(path="d.parquet"))
{'day': '2030-01-02'}
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from rlhfspec.job import Dataset
from rlhfspec.training.data.rows import Rows

_LEFT_OUT = object()
PROMPT, MESSAGES = "prompt", "messages"  # argument names of reward functions


def columns_of(row: Mapping[str, Any], dataset: Dataset) -> dict[str, Any]:
    """Return a row's columns without the prompt text. Chat messages also appear as `messages`."""
    columns = {}
    for name, value in row.items():
        if name == PROMPT == dataset.prompt_column:
            continue
        plain = _plain_or_left_out(value)
        if plain is not _LEFT_OUT:
            columns[name] = plain
    if dataset.messages_column is not None:
        columns.setdefault(MESSAGES, columns[dataset.messages_column])
    return columns


def json_text(content: Mapping[str, Any]) -> str:
    """Return one-line JSON, escaped where UTF-8 cannot encode it."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(content, allow_nan=False)
    return text


def columns_of_rows(rows: Rows, dataset: Dataset, indices: Iterable[int]) -> dict[str, str]:
    """Map each column to the line of the first row that lacks it, or to an empty string if none does."""
    missing: dict[str, str] = {}
    first = None
    for index in indices:
        names = columns_of(rows.records[index], dataset)
        for name in missing.keys() - names.keys():
            missing[name] = missing[name] or rows.where(index)
        for name in names.keys() - missing.keys():
            missing[name] = "" if first is None else first
        first = first or rows.where(index)
    return missing


def _plain_or_left_out(value: Any) -> Any:
    try:
        return _plain(value)
    except RecursionError:
        return _LEFT_OUT


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        items = ((str(key), _plain(child)) for key, child in value.items())
        return {key: child for key, child in items if child is not _LEFT_OUT}
    if isinstance(value, list | tuple | set):
        return [child for child in map(_plain, value) if child is not _LEFT_OUT]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal | timedelta | UUID):
        return str(value)
    return _plain(value.tolist()) if hasattr(value, "tolist") else _LEFT_OUT  # numpy values
