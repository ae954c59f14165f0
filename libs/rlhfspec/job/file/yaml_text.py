"""YAML or JSON as plain values, with the line of each. Ambiguous YAML is refused.

Scalars follow YAML 1.2: `1e-6` is a number, only `true` and `false` are booleans, and dates are text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import ComposerError

from rlhfspec.errors import JobError, Problem

_MAX_JOB_FILE_BYTES = 256 * 1024  # 256 KiB; a job is a page of text, so larger files are something else
MOST_VALUES = 20_000  # after aliases are expanded
MOST_DEPTH = 30

Path_ = tuple[str | int, ...]


@dataclass(slots=True)
class Document:
    """Parsed text: its plain value, the line (from 1) of each path, and problems."""

    value: Any
    lines: dict[Path_, int] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's own shape)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$"
               r"|\.(?:nan|NaN|NAN)$"),
    list("-+.0123456789"),
)  # fmt: skip


def read_text(path: Path) -> str:
    if path.is_dir():
        raise _unreadable(path, "this is a folder; name the job file in it")
    if not path.exists():
        near = sorted(p.name for p in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
        there = f"; beside it: {', '.join(near[:5])}" if near else "; `rlhfspec init` writes one"
        raise _unreadable(path, f"no such file{there}")
    if not path.is_file():
        raise _unreadable(path, "must be a regular file; this is a pipe or a device")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror}") from error
    if len(data) > _MAX_JOB_FILE_BYTES:
        raise _unreadable(path, f"is {len(data)} bytes; a job file has at most {_MAX_JOB_FILE_BYTES}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _unreadable(path, "must be UTF-8 text; save it in that encoding", f"line {line}") from error


def parse(text: str, *, source: str) -> Document:
    """Parse a text with one document. Problems that leave the rest readable are collected, others raise JobError."""
    if source.endswith(".json"):
        text = text.replace("\t", " ")  # JSON allows tabs between values, YAML does not; strings contain them as \t
    reader = _Reader()
    try:
        node = yaml.compose(text, Loader=_Loader)
        value = None if node is None else reader.plain(node, ())
    except RecursionError:
        raise JobError(source, [Problem(field="file", problem="is nested too deeply")]) from None
    except yaml.MarkedYAMLError as error:
        raise JobError(source, [_syntax_problem(error)]) from error
    except yaml.YAMLError as error:
        raise JobError(source, [Problem(field="file", problem=f"is not YAML: {error}")]) from error
    if node is None:
        raise JobError(source, [Problem(field="file", problem="is empty; `rlhfspec init` writes a job to start from")])
    if reader.num_values > MOST_VALUES:
        problem = f"holds over {MOST_VALUES} values once its aliases are expanded"
        raise JobError(source, [Problem(field="file", problem=problem)])
    return Document(value, reader.lines, reader.problems)


def parse_value(text: str) -> Any:
    """Parse one value of `--set`, as in a job file.

    >>> parse_value("1e-6"), parse_value("off"), parse_value("[1, true]"), parse_value("")
    (1e-06, 'off', [1, True], None)
    """
    return parse(text, source="--set").value if text.strip() else None


class _Reader:
    """Converter of YAML nodes to plain values, which records lines and problems."""

    def __init__(self) -> None:
        self.lines: dict[Path_, int] = {}
        self.problems: list[Problem] = []
        self.num_values = 0
        self._open: set[int] = set()
        self._scalars = _Loader("")

    def plain(self, node: yaml.Node, path: Path_) -> Any:
        self.num_values += 1
        self.lines[path] = node.start_mark.line + 1
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if self.num_values > MOST_VALUES:
            return None
        if len(path) > MOST_DEPTH:
            raise RecursionError
        if node.tag not in _TAGS:
            self._problem(path, node, f"the tag {node.tag} is not supported; remove it")
        if id(node) in self._open:
            self._problem(path, node, "is an alias that contains itself; write the value out")
            return None
        self._open.add(id(node))
        value = self._mapping(node, path) if isinstance(node, yaml.MappingNode) else self._list(node, path)
        self._open.discard(id(node))
        return value

    def _list(self, node: yaml.Node, path: Path_) -> list[Any]:
        return [self.plain(child, (*path, index)) for index, child in enumerate(node.value)]

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key_node, child in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if not isinstance(key, str) or key_node.tag.endswith(":null"):
                self._problem(path, key_node, "a key must be a name")
            elif key in value:
                first = self.lines[(*path, key)]
                self._problem((*path, key), key_node, f"is written twice, first in line {first}; keep one")
            elif key == "<<":
                self._problem((*path, key), key_node, "merge keys are not supported; write the fields out")
            else:
                value[key] = self.plain(child, (*path, key))
                self.lines[(*path, key)] = key_node.start_mark.line + 1
        return value

    def _scalar(self, node: yaml.ScalarNode, path: Path_) -> Any:
        if node.tag not in _TAGS:
            self._problem(path, node, f"the tag {node.tag} is not supported; remove it")
            return str(node.value)
        try:
            value = self._scalars.construct_object(node)
            if isinstance(value, str):
                value.encode()
        except ValueError as error:  # !!int of a word, an integer of thousands of digits, or half a surrogate pair
            self._problem(path, node, f"cannot be read: {error}")
            return None
        return value

    def _problem(self, path: Path_, node: yaml.Node, problem: str) -> None:
        self.problems.append(Problem(field=dotted(path), problem=problem, where=f"line {node.start_mark.line + 1}"))


_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")}


def dotted(path: Path_) -> str:
    """Return a path such as `spec.rewards.sources[0].weight`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "file"


def parts_of(text: str) -> Path_:
    """Return the parts of a dotted path, with list indices as integers."""
    parts = re.sub(r"\[(\d+)\]", r".\1", text).split(".")
    return tuple(int(part) if part.isdecimal() else part for part in parts)


def child_of(holder: Any, key: str | int) -> Any:
    if isinstance(holder, dict):
        return holder.get(str(key))
    return holder[key] if isinstance(holder, list) and isinstance(key, int) and key < len(holder) else None


def _syntax_problem(error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    problem = f"is not YAML: {error.problem or 'cannot be read'}"
    if "'\\t'" in problem:
        problem = "is not YAML: a tab indents this line; YAML takes spaces only"
    elif isinstance(error, ComposerError) and "document" in problem:
        problem = "holds several documents; one file is one job"
    elif "mapping values are not allowed" in problem:
        problem += "; a text with a colon needs quotes, and keys of one block the same indentation"
    return Problem(field="file", problem=problem, where=f"line {mark.line + 1}" if mark else "")


def _unreadable(path: Path, problem: str, where: str = "") -> JobError:
    return JobError(str(path), [Problem(field="file", problem=problem, where=where)])
