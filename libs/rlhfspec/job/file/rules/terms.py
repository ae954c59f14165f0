"""What a rule says, once: a term has a value for a job here, and is text in the API server's language (CEL) there.

An API server fills in the defaults of fields, but not of blocks left out: every field is read with its default.

Example:
    >>> rule = ~is_set("model.critic") | (field("generation.maxTokens") < 100)
    >>> rule.cel
    '!self.spec.?model.?critic.hasValue() || self.spec.?generation.?maxTokens.orValue(256) < 100'
    >>> rule.fields
    ('model.critic', 'generation.maxTokens')
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from pydantic.alias_generators import to_snake
from pydantic.fields import FieldInfo

from rlhfspec.job import Algorithm, Spec
from rlhfspec.job.block import Block, blocks_of
from rlhfspec.job.choices.algorithms import ALGORITHMS


class Binds(IntEnum):
    """How tightly the outermost operation of a text holds its parts together."""

    OR = 1
    AND = 2
    COMPARED = 3
    ADDED = 4
    NOTHING = 5  # there is none


@dataclass(frozen=True, slots=True)
class Term:
    cel: str
    value: Callable[[Spec], Any]
    fields: tuple[str, ...] = ()  # that it looks at
    binds: Binds = Binds.NOTHING

    def __or__(self, other: Term) -> Term:
        """The second is only looked at where the first does not hold."""
        return self._with(
            other, "||", Binds.OR, lambda spec: self.value(spec) or other.value(spec), bare=Binds.COMPARED
        )

    def __and__(self, other: Term) -> Term:
        return self._with(other, "&&", Binds.AND, lambda spec: self.value(spec) and other.value(spec))

    def __invert__(self) -> Term:
        text = self.cel if self.binds == Binds.NOTHING else f"({self.cel})"
        return Term(f"!{text}", lambda spec: not self.value(spec), self.fields)

    def __ge__(self, other: Term | float) -> Term:
        return self._compared(other, ">=", lambda left, right: left >= right)

    def __le__(self, other: Term | float) -> Term:
        return self._compared(other, "<=", lambda left, right: left <= right)

    def __lt__(self, other: Term | float) -> Term:
        return self._compared(other, "<", lambda left, right: left < right)

    def equals(self, other: Any) -> Term:
        return self._compared(other, "==", lambda left, right: left == right)

    def differs_from(self, other: Any) -> Term:
        return self._compared(other, "!=", lambda left, right: left != right)

    def is_in(self, values: Sequence[Any]) -> Term:
        return self._compared(list(values), "in", lambda left, right: left in right)

    def __add__(self, other: Term) -> Term:
        return self._with(other, "+", Binds.ADDED, lambda spec: self.value(spec) + other.value(spec))

    def __mul__(self, other: Term) -> Term:
        return self._with(other, "*", Binds.ADDED, lambda spec: self.value(spec) * other.value(spec))

    def __mod__(self, other: Term) -> Term:
        return self._with(other, "%", Binds.ADDED, lambda spec: self.value(spec) % other.value(spec))

    def matches(self, pattern: re.Pattern[str]) -> Term:
        return self._calls(f"matches({json.dumps(pattern.pattern)})", lambda text: pattern.match(text) is not None)

    def starts_with(self, text: str) -> Term:
        return self._calls(f"startsWith({json.dumps(text)})", lambda whole: whole.startswith(text))

    def has_part(self, part: str, *, between: str) -> Term:
        cel = f"split({json.dumps(between)}).exists(part, part == {json.dumps(part)})"
        return self._calls(cel, lambda whole: part in whole.split(between))

    def is_empty(self) -> Term:
        called = self._calls("size()", len)
        return called.equals(0)

    def _compared(self, other: Any, sign: str, holds: Callable[[Any, Any], Any]) -> Term:
        right = other if isinstance(other, Term) else Term(json.dumps(other), lambda _: other)
        return self._with(right, sign, Binds.COMPARED, lambda spec: holds(self.value(spec), right.value(spec)))

    def _with(
        self, other: Term, sign: str, binds: Binds, value: Callable[[Spec], Any], bare: Binds | None = None
    ) -> Term:
        """A part stands without parentheses that is of the same operation, or binds as tightly as `bare`."""
        least = bare or Binds(binds + 1)
        parts = [each.cel if each.binds in (binds, *range(least, 9)) else f"({each.cel})" for each in (self, other)]
        return Term(f" {sign} ".join(parts), value, tuple(dict.fromkeys((*self.fields, *other.fields))), binds)

    def _calls(self, cel: str, value: Callable[[Any], Any]) -> Term:
        return Term(f"{self.cel}.{cel}", lambda spec: value(self.value(spec)), self.fields)


def field(path: str) -> Term:
    """A field of spec, or its default where it is left out."""
    default, selected = info_of(path).default, _selected(path)
    cel = selected if default is None or isinstance(default, Block) else f"{selected}.orValue({json.dumps(default)})"
    return Term(cel, lambda spec: value_at(spec, path), (path,))


def of_algorithm(path: str) -> Term:
    """A field whose default depends on the algorithm."""
    alias = path.partition(".")[2]
    snake = next(name for name, each in Algorithm.model_fields.items() if each.alias == alias)
    own: dict[str, list[str]] = {}
    for name, entry in ALGORITHMS.items():
        if snake in entry.defaults:
            own.setdefault(json.dumps(entry.defaults[snake]), []).append(name)
    chosen = json.dumps(Algorithm.model_fields[snake].default)
    for default, algorithms in own.items():
        chosen = f"({field('algorithm.name').cel} in {json.dumps(algorithms)} ? {default} : {chosen})"
    return Term(f"{_selected(path)}.orValue({chosen})", lambda spec: value_at(spec, path), (path,))


def given(path: str) -> Term:
    """A field that is known to be set."""
    return Term(f"self.spec.{path}", lambda spec: value_at(spec, path), (path,))


def is_set(path: str) -> Term:
    """Neither left out nor null, which is the same here."""
    return Term(f"{_selected(path)}.hasValue()", lambda spec: value_at(spec, path) is not None, (path,))


def _selected(path: str) -> str:
    return f"self.spec.?{path.replace('.', '.?')}"


def value_at(spec: Spec, path: str) -> Any:
    """Of a field of spec, such as model.critic; null where its block is."""
    block: Any = spec
    for name in path.split("."):
        block = None if block is None else getattr(block, to_snake(name))
    return block


def info_of(path: str) -> FieldInfo:
    """What the job's schema says of a field of spec."""
    block: type[Block] = Spec
    *outer, last = path.split(".")
    for name in outer:
        block = blocks_of(_named(block, name).annotation)[0]
    return _named(block, last)


def _named(block: type[Block], camel: str) -> FieldInfo:
    return next(each for each in block.model_fields.values() if each.alias == camel)
