"""Pydantic errors in terms of the job file: path, line, requirement and nearest name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlhfspec.errors import Problem, did_you_mean, nearest
from rlhfspec.job import RLHFJob
from rlhfspec.job.block import Block, blocks_of
from rlhfspec.job.file.secrets import shown_value
from rlhfspec.job.file.yaml_text import Path_, child_of, dotted, parts_of

_TYPE_WORDS = {
    "int": "a whole number", "float": "a number", "bool": "true or false", "string": "text (in quotes when it looks "
    "like something else)", "list": "a list", "dict": "a block of names and values", "model": "a block of fields",
}  # fmt: skip
_BOUNDS = {"greater_than_equal": ">=", "greater_than": ">", "less_than_equal": "<=", "less_than": "<"}
_PATTERNS: dict[Path_, str] = {
    ("metadata", "name"): "must be at most 52 lower case letters, digits and inner dashes, such as my-run-1"
}
_TOLD: dict[Path_, str] = {
    ("spec", "roles", "trainer", "ranks"): "set ranksPerNode, and nodes for more than one node",
    ("spec", "roles", "trainer", "contextParallel"): "is not supported: a whole sequence is on one rank, "
    "or on one tensor-parallel group; remove it",
}
_SOURCES_PATH: Path_ = ("spec", "rewards", "sources")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Problem of a job that fits the schema. It is dropped if a field in `depends_on` is itself wrong."""

    field: str
    problem: str
    value: object = None
    depends_on: tuple[str, ...] = ()

    def as_problem(self, places: Mapping[Path_, str]) -> Problem:
        path = parts_of(self.field)
        value = shown_value(path, self.value)
        return Problem(field=self.field, value=value, problem=self.problem, where=place_of(path, places))


def explain(error: ValidationError, value: Any, places: Mapping[Path_, str]) -> tuple[list[Problem], list[Path_]]:
    by_path: dict[Path_, Problem] = {}
    for details in error.errors(include_url=False):
        path = _path_in_file(details, value)
        if path not in by_path:  # each branch of a union reports an error; the first is enough
            by_path[path] = _problem(details, path, value, places)
    return list(by_path.values()), list(by_path)


def place_of(path: Path_, places: Mapping[Path_, str]) -> str:
    """Return where a value, or its innermost block with a known place, was written."""
    while path and path not in places:
        path = path[:-1]
    return places.get(path, "") if path else ""


def unknown_key(path: Path_, value: Any) -> str:
    """Return an unknown key's message with the nearest key, here or in another block."""
    if (told := _TOLD.get(path)) is not None:
        return f"unknown key; {told}"
    known = [str(field.alias) for block in _blocks_at(path[:-1], value)[:1] for field in block.model_fields.values()]
    near = nearest(str(path[-1]), known)
    if near is None:
        elsewhere = dict(_all_fields(RLHFJob))
        name = nearest(str(path[-1]), list(elsewhere))
        near = elsewhere[name] if name else None
    return f"unknown key; did you mean {near}?" if near else f"unknown key; known here: {', '.join(known)}"


def _problem(details: ErrorDetails, path: Path_, value: Any, places: Mapping[Path_, str]) -> Problem:
    missing = details["type"] in ("missing", "extra_forbidden", "union_tag_not_found")
    got = None if missing or isinstance(details["input"], (dict, list)) else shown_value(path, details["input"])
    text = _text(details, path, value)
    if not missing and details["input"] is None:
        text += ", and is empty here"
    return Problem(field=dotted(path), value=got, problem=text, where=place_of(path, places))


def _text(details: ErrorDetails, path: Path_, value: Any) -> str:
    kind, context = details["type"], details.get("ctx", {})
    field = _field_at(path, value)
    if kind == "missing":
        return f"is required. {field.description}" if field and field.description else "is required"
    if kind == "extra_forbidden":
        return unknown_key(path, value)
    if kind == "literal_error":
        return _one_of(details["input"], [str(option) for option in _literals(field)] or [context["expected"]])
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return "type must be one of function, model, http"
    if kind in _BOUNDS or kind == "finite_number":
        return f"must be a finite number{_bounds(field)}" if kind == "finite_number" else f"must be{_bounds(field)}"
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(path, "must start with http:// or https://")
    if kind in ("string_too_short", "too_short"):
        return "must not be empty"
    for name, words in _TYPE_WORDS.items():
        if kind in (f"{name}_type", f"{name}_from_float"):
            return f"must be {words}{_bounds(field)}"
    return details["msg"][:1].lower() + details["msg"][1:]


def _one_of(given: Any, options: list[str]) -> str:
    if len(options) == 1:
        return f"must be {options[0]}"
    hint = did_you_mean(given, options) if isinstance(given, str) else ""
    return f"must be one of {', '.join(options)}{hint}"


def _bounds(field: FieldInfo | None) -> str:
    texts = []
    for bound in _metadata(field) if field else ():
        if isinstance(bound, Ge):
            texts.append(f">= {bound.ge}")
        elif isinstance(bound, Gt):
            texts.append(f"> {bound.gt}")
        elif isinstance(bound, Le):
            texts.append(f"<= {bound.le}")
        elif isinstance(bound, Lt):
            texts.append(f"< {bound.lt}")
    return f" {' and '.join(texts)}" if texts else ""


def _metadata(field: FieldInfo) -> Iterator[Any]:
    yield from field.metadata
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        for inner in getattr(annotation, "__metadata__", ()):
            yield from inner.metadata if isinstance(inner, FieldInfo) else (inner,)
        pending += get_args(annotation)


def _literals(field: FieldInfo | None) -> list[Any]:
    return [option for option in get_args(field.annotation) if isinstance(option, str)] if field else []


def _path_in_file(details: ErrorDetails, value: Any) -> Path_:
    """Return the error's path in the file, without pydantic's names of union branches."""
    location: Path_ = details["loc"]
    if location[:3] == _SOURCES_PATH and len(location) > 4:
        location = (*location[:4], *location[5:])
    path: Path_ = ()
    for index, part in enumerate(location):
        is_there = isinstance(value, dict) and part in value
        is_item = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if is_there or is_item:
            value = value[part]
        elif not (details["type"] == "missing" and index == len(location) - 1):
            continue
        path = (*path, part)
    return path


def _field_at(path: Path_, value: Any) -> FieldInfo | None:
    blocks = _blocks_at(path[:-1], value) if path else []
    fields = (field for block in blocks for field in block.model_fields.values())
    return next((field for field in fields if field.alias == path[-1]), None)


def _blocks_at(path: Path_, value: Any) -> list[type[Block]]:
    """Return the Block classes allowed at a path, best match for the value's `type` first."""
    blocks: list[type[Block]] = [RLHFJob]
    for part in path:
        value = child_of(value, part)
        if isinstance(part, str):
            fields = [field for block in blocks for field in block.model_fields.values() if field.alias == part]
            blocks = [block for field in fields for block in blocks_of(field.annotation)]
    kind = value.get("type") if isinstance(value, dict) else None
    return sorted(
        blocks, key=lambda block: "type" in block.model_fields and kind not in _literals(block.model_fields["type"])
    )


def _all_fields(block: type[Block], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield (name, path inside spec) of every field, outer blocks last."""
    for field in reversed(block.model_fields.values()):
        path = f"{prefix}{field.alias}"
        for inner in blocks_of(field.annotation):
            yield from _all_fields(inner, "" if path == "spec" else f"{path}.")
        yield str(field.alias), path
