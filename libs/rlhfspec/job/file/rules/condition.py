"""Conditions on a job's fields: Python expressions, evaluated here and translated to CEL for an API server.

API servers fill in no defaults of missing blocks, so fields are read with defaults unless compared with None.

>>> to_cel("model.critic is None or generation.maxTokens < 100")
'!self.spec.?model.?critic.hasValue() || self.spec.?generation.?maxTokens.orValue(256) < 100'
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import CodeType
from typing import Any

from pydantic.alias_generators import to_snake
from pydantic.fields import FieldInfo

from rlhfspec.job import Algorithm, Spec
from rlhfspec.job.block import Block, blocks_of
from rlhfspec.job.choices.algorithms import ALGORITHMS

_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "size": len,
    "matches": lambda text, pattern: re.match(pattern, text) is not None,
    "starts_with": str.startswith,
    "has_part": lambda text, between, part: part in text.split(between),
}
_IN_CEL: Mapping[str, str] = {
    "size": "{}.size()",
    "matches": "{}.matches({})",
    "starts_with": "{}.startsWith({})",
    "has_part": "{}.split({}).exists(part, part == {})",
}
_SIGNS: Mapping[type, str] = {
    ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.In: "in",
    ast.Add: "+", ast.Mult: "*", ast.Mod: "%", ast.And: "&&", ast.Or: "||",
}  # fmt: skip


def value_of(condition: str, spec: Spec) -> Any:
    return eval(_code(condition), {"at": lambda path: value_at(spec, path), **_FUNCTIONS})


def fields_of(condition: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_paths(_parsed(condition))))


@cache
def to_cel(condition: str) -> str:
    parsed = _parsed(condition)
    compared = {_path(node.left) for node in ast.walk(parsed) if isinstance(node, ast.Compare) and _is_none(node)}
    return _Translator(tuple(filter(None, compared))).text(parsed)


class _Translator:
    """Translator of Python expressions to CEL. `nullable`: paths compared with None, read without default."""

    def __init__(self, nullable: tuple[str, ...]) -> None:
        self._nullable = nullable

    def text(self, node: ast.AST) -> str:
        if path := _path(node):
            return self._field(path)
        match node:
            case ast.BoolOp(op=op, values=parts):
                return f" {_SIGNS[type(op)]} ".join(self._part(part) for part in parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"!{self._part(operand, also=ast.Compare)}"
            case ast.BinOp(left=left, op=op, right=right):
                return f"{self._part(left)} {_SIGNS[type(op)]} {self._part(right)}"
            case ast.Compare(left=left) if _is_none(node):
                has_value = f"{_selected(_path(left))}.hasValue()"
                return has_value if isinstance(node.ops[0], ast.IsNot) else f"!{has_value}"
            case ast.Compare(left=left, ops=[ast.NotIn()], comparators=[right]):
                return f"!({self.text(left)} in {self.text(right)})"
            case ast.Compare(left=left, ops=ops, comparators=others):
                pairs = zip([left, *others], ops, others, strict=False)
                return " && ".join(f"{self.text(a)} {_SIGNS[type(op)]} {self.text(b)}" for a, op, b in pairs)
            case ast.Call(func=ast.Name(id=name), args=arguments):
                return _IN_CEL[name].format(*map(self.text, arguments))
        return json.dumps(ast.literal_eval(node))

    def _part(self, node: ast.AST, also: type[ast.AST] = ast.BoolOp) -> str:
        """Return an operand as CEL, in parentheses if needed."""
        is_range = isinstance(node, ast.Compare) and len(node.ops) > 1
        needs = isinstance(node, ast.BoolOp | ast.BinOp | also) or is_range
        return f"({self.text(node)})" if needs and not _is_none(node) else self.text(node)

    def _field(self, path: str) -> str:
        if any(f"{path}.".startswith(f"{nullable}.") for nullable in self._nullable):
            return f"self.spec.{path}"
        return f"{_selected(path)}.orValue({_default(path)})"


def _default(path: str) -> str:
    """Return a field's default, which may depend on the algorithm, as a CEL expression."""
    block, _, name = path.rpartition(".")
    default = json.dumps(info_of(path).default)
    own: dict[str, list[str]] = {}
    if block == "algorithm":
        snake = next(each for each, info in Algorithm.model_fields.items() if info.alias == name)
        for algorithm, entry in ALGORITHMS.items():
            if snake in entry.defaults:
                own.setdefault(json.dumps(entry.defaults[snake]), []).append(algorithm)
    for value, algorithms in own.items():
        default = f"({to_cel('algorithm.name')} in {json.dumps(algorithms)} ? {value} : {default})"
    return default


def value_at(spec: Spec, path: str) -> Any:
    """Return the value of the field at a dotted path, or None if its block is None."""
    block: Any = spec
    for name in path.split("."):
        block = None if block is None else getattr(block, to_snake(name))
    return block


def info_of(path: str) -> FieldInfo:
    block: type[Block] = Spec
    *outer, last = path.split(".")
    for name in outer:
        block = blocks_of(_named(block, name).annotation)[0]
    return _named(block, last)


def _named(block: type[Block], camel: str) -> FieldInfo:
    return next(each for each in block.model_fields.values() if each.alias == camel)


@cache
def _parsed(condition: str) -> ast.expr:
    return ast.parse(condition, mode="eval").body


@cache
def _code(condition: str) -> CodeType:
    body = _AtPaths().visit(ast.parse(condition, mode="eval").body)
    return compile(ast.fix_missing_locations(ast.Expression(body)), condition, "eval")


class _AtPaths(ast.NodeTransformer):
    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.parse(f"at({_path(node)!r})", mode="eval").body


def _path(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute) else ""


def _paths(node: ast.AST) -> Iterator[str]:
    if path := _path(node):
        yield path
    else:
        for child in ast.iter_child_nodes(node):
            yield from _paths(child)


def _selected(path: str) -> str:
    return f"self.spec.?{path.replace('.', '.?')}"


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot)
