"""The tables of docs/job.md: every field of a job with its type, bounds, default and description, from its schema."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlhfspec.job import Spec
from rlhfspec.job.block import MOST, MOST_SECONDS, MOST_WORKERS, Mark, marked
from rlhfspec.job.file.schema import json_schema

JsonSchema = dict[str, Any]
_TYPES = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "map"}
_BOUNDS = {"minimum": ">= {}", "exclusiveMinimum": "> {}", "maximum": "<= {}", "exclusiveMaximum": "< {}"}
_LIMITS = {"minItems": "at least {}", "maxItems": "at most {}", "maxLength": "at most {} characters"}
_MARKS = {
    Mark.CLUSTER_ONLY: "In a cluster only.",
    Mark.MUTABLE: "Mutable.",
    Mark.MUTABLE_WHILE_SUSPENDED: "Mutable while suspended.",
    Mark.RECORDED: "May differ when a run is resumed; recorded.",
}
_MARKED = {mark: tuple(f"spec.{path}" for path in marked(Spec, mark)) for mark in _MARKS}
_SAID_ABOVE = (MOST, MOST_SECONDS, MOST_WORKERS)  # bounds of many fields: the page says them once
_BY_ALGORITHM = " Default: "  # as `json_schema` writes defaults that differ by algorithm


@dataclass(frozen=True)
class Row:
    path: str
    type: str
    default: str
    description: str

    def line(self, path: str) -> str:
        cells = (f"`{path}`", self.type, self.default, self.description)
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


@dataclass(frozen=True)
class Table:
    """The fields of one block, and the blocks within it."""

    path: str
    description: str
    rows: tuple[Row, ...]
    inner: tuple[Table, ...]


def fields_text() -> str:
    """All tables, each behind the path of its block.

    >>> "| `seed` | integer >= 0, < 2^63 | `0` | Random seed for data order, sampling" in fields_text()
    True
    """
    schema = json_schema()["properties"]
    metadata = _table("metadata", schema["metadata"], None)
    spec = _table("spec", schema["spec"], None)
    tables = [each for each in spec.inner if each.path != "spec.roles"]
    top = Table("spec", spec.description, spec.rows, ())
    roles = next(each for each in spec.inner if each.path == "spec.roles")
    return "\n\n".join(
        [*_written(metadata), *_written(top), *(text for each in tables for text in _written(each)), *_roles(roles)]
    )


def _table(path: str, block: JsonSchema, default: Any) -> Table:
    """`default`: what the block around gives this one, where that differs from the fields' own."""
    rows, inner = [], []
    required = block.get("required", ())
    for name, field in block["properties"].items():
        own = default[name] if isinstance(default, dict) and name in default else field.get("default")
        within = _block_of(field)
        if within is None or within.get("nullable"):
            rows.append(_row(f"{path}.{name}", field, own, required=name in required))
        if within is not None:
            given = own if isinstance(own, dict) else None
            inner.append(_table(f"{path}.{name}{within.get('suffix', '')}", within, given))
    return Table(path, block.get("description", ""), tuple(rows), tuple(inner))


def _block_of(field: JsonSchema) -> JsonSchema | None:
    """The block that a field holds, or a list of blocks, which has a row of its own too."""
    if "properties" in field:
        return field
    branches = [branch for branch in field.get("anyOf", ()) if "properties" in branch]
    if branches:
        return {**branches[0], "nullable": True}
    items = field.get("items", {})
    if "properties" in items:
        return {**items, "nullable": True, "suffix": "[]"}
    if "oneOf" in items:
        required = {name for kind in items["oneOf"] for name in kind["required"]}
        return {"properties": _of_any(items["oneOf"]), "required": required, "nullable": True, "suffix": "[]"}
    return None


def _of_any(kinds: list[JsonSchema]) -> dict[str, JsonSchema]:
    """The fields of all kinds of a source; those of some say of which."""
    merged: dict[str, JsonSchema] = {}
    names = [kind["properties"]["type"]["const"] for kind in kinds]
    for field in dict.fromkeys(["type", *(field for kind in kinds for field in kind["properties"])]):
        having = [(name, kind) for name, kind in zip(names, kinds, strict=True) if field in kind["properties"]]
        schema = having[0][1]["properties"][field]
        if field == "type":
            schema = {"enum": names, "description": schema["description"]}
        elif len(having) < len(kinds):
            of_kind = " and ".join(f"`{name}`" for name, _ in having)
            schema = schema | {"description": f"Of type {of_kind} only. {schema['description']}"}
        merged[field] = schema
    return merged


def _row(path: str, field: JsonSchema, default: Any, *, required: bool) -> Row:
    description, by_algorithm, defaults = field.get("description", "").partition(_BY_ALGORITHM)
    if required:
        shown = "required"
    elif by_algorithm:
        shown = defaults.rstrip(".")
    else:
        shown = f"`{json.dumps(default)}`"
    return Row(path, type_of(field), shown, " ".join([description, *_marks_of(path)]))


def _marks_of(path: str) -> Iterator[str]:
    plain = path.replace("[]", "")
    for mark, paths in _MARKED.items():
        if any(plain == each or plain.startswith(f"{each}.") for each in paths):
            yield f"*{_MARKS[mark]}*"


def type_of(field: JsonSchema) -> str:
    """In words, with its bounds.

    >>> type_of({"type": "integer", "minimum": 1, "maximum": 64}), type_of({"enum": ["a", "b"]})
    ('integer >= 1, <= 64', '`a`, `b`')
    """
    if "anyOf" in field:
        return " or ".join(type_of(branch) for branch in field["anyOf"])
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "null":
        return "null"
    if field.get("type") == "array":
        of_items = "blocks" if "properties" in field["items"] or "oneOf" in field["items"] else type_of(field["items"])
        return _with_limits(f"list of {of_items}", field)
    if "properties" in field:
        return "block"
    if isinstance(field.get("additionalProperties"), dict) and field["additionalProperties"]:
        keys = field.get("propertyNames", {}).get("enum")
        of_what = "" if keys is None else " of " + ", ".join(f"`{key}`" for key in keys)
        return f"map{of_what} to {type_of(field['additionalProperties'])}"
    text = ("non-empty " if field.get("minLength") == 1 else "") + _TYPES[field["type"]]
    bounds = _said(field, _BOUNDS)
    return _with_limits(f"{text} {', '.join(bounds)}" if bounds else text, field)


def _with_limits(text: str, field: JsonSchema) -> str:
    matching = [f"matching {_code(field['pattern'])}"] if "pattern" in field else []
    return ", ".join([text, *_said(field, _LIMITS), *matching])


def _said(field: JsonSchema, words: dict[str, str]) -> list[str]:
    return [words[key].format(_number(field[key])) for key in words if key in field and field[key] not in _SAID_ABOVE]


def _code(pattern: str) -> str:
    """A pattern with "](" would read as a link."""
    return f"<code>{pattern.replace('](', ']&#40;')}</code>"


def _number(value: float) -> str:
    return "2^63" if value == 1 << 63 else f"{value:g}"


def _written(table: Table) -> Iterator[str]:
    if table.rows:
        path = table.path.removeprefix("spec.")
        rows = [row.line(row.path.rpartition(".")[2]) for row in table.rows]
        yield "\n".join([f"### `{path}`", "", *_sentence(table), *_HEAD, *rows])
    for inner in table.inner:
        yield from _written(inner)


_HEAD = ("| field | type | default | description |", "|---|---|---|---|")


def _sentence(table: Table) -> list[str]:
    return [table.description, ""] if table.description else []


def _roles(roles: Table) -> Iterator[str]:
    """What several roles have in common is told once, as ROLE; what a role has otherwise, at the role."""
    by_role = {role.path.rpartition(".")[2]: role for role in roles.inner}
    fields = {name: [replace(row, path=row.path.rpartition(".")[2]) for row in by_role[name].rows] for name in by_role}
    listed = [f"| `{name}` | {role.description} |" for name, role in by_role.items()]
    yield "\n".join(["### `roles`", "", roles.description, "", "| role | description |", "|---|---|", *listed])
    times = Counter(row for rows in fields.values() for row in rows)
    common = [row for row in times if times[row] > 1]
    lines = [_of_roles(row, fields).line(row.path) for row in common]
    text = "`ROLE` is any of these roles, if a field does not say otherwise."
    yield "\n".join(["### `roles.ROLE`", "", text, "", *_HEAD, *lines])
    for name, role in by_role.items():
        own = tuple(row for row in fields[name] if row not in common)
        yield from _written(Table(role.path, "", own, role.inner))


def _of_roles(row: Row, fields: dict[str, list[Row]]) -> Row:
    without = [f"`{name}`" for name, rows in fields.items() if row.path not in {each.path for each in rows}]
    said = f" Not for {' and '.join(without)}." if without else ""
    return replace(row, description=row.description + said)
