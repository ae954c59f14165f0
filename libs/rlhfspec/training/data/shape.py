"""Checks that rows have what the job needs. Every malformed row is named by its line, column and value.

Example:
    >>> from rlhfspec.training.data.rows import Rows
    >>> try:
    ...     check_rows(Rows(source="d.jsonl", records=[{"promt": "1+1="}], lines=[1]), Dataset(path="d.jsonl"))
    ... except JobError as error:
    ...     print(error)
    d.jsonl: line 1: spec.dataset.promptColumn: no column prompt; this row has promt; did you mean promt? (got 'prompt')
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rlhfspec.errors import JobError, Problem, did_you_mean
from rlhfspec.job import Dataset
from rlhfspec.training.data.rows import Rows
from rlhfspec.training.data.text_files import at_most


def check_rows(rows: Rows, dataset: Dataset) -> None:
    problems = []
    for index, row in enumerate(rows.records):
        problems += [
            Problem(field=field, value=value, problem=problem, where=rows.where(index))
            for field, value, problem in _row_problems(row, dataset)
        ]
    if problems:
        raise JobError(rows.source, at_most(problems))


def _row_problems(row: Mapping[str, Any], dataset: Dataset) -> Iterator[tuple[str, object, str]]:
    chat = dataset.messages_column is not None
    name, column = ("messagesColumn", dataset.messages_column) if chat else ("promptColumn", dataset.prompt_column)
    field = f"spec.dataset.{name}"
    assert column is not None, "the job was checked"
    if column not in row:
        there = ", ".join(row) or "none"
        yield field, column, f"no column {column}; this row has {there}{did_you_mean(column, row)}"
        return
    problem = _messages_problem(row[column]) if chat else _prompt_problem(row[column])
    if problem:
        yield field, None, f"column {column} {problem}"


def _prompt_problem(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"must be text, not {_kind(value)}"
    return _text_problem(value) if value else "is empty; remove the row"


def _text_problem(text: str) -> str | None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = ascii(text[error.start])[1:-1]
        return f"holds half of a character ({found}, at position {error.start + 1}); write the whole one, or remove it"
    return None


def _messages_problem(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f'must be a list such as [{{"role": "user", "content": "..."}}], not {_kind(value)}'
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            return f"message {number} must be an object with role and content, not {_kind(message)}"
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                return f"message {number}: {key} must be text, not {_kind(message.get(key))}"
            if problem := _text_problem(message[key]):
                return f"message {number}: {key} {problem}"
    if value[-1]["role"] == "assistant":
        return "ends with an answer (role assistant); the last message must be one to answer"
    return None


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {str: "text", bool: "a truth value", int: "a number", float: "a number", list: "a list", dict: "an object"}
    if isinstance(value, list) and not value:
        return "an empty list"
    return names.get(type(value), type(value).__name__)
