"""Translation between dataclasses and protobuf messages with the same field names.

Mappings and tuples of pairs become a repeated message of two fields, in order. Fields that may be None are `optional`;
an optional mapping is None if the message has no entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def write(message: Any, value: Any) -> None:
    """Set all fields of `message`, or raise UnfitField."""
    for name, way in _ways(type(value)):
        try:
            way.put(message, name, getattr(value, name))
        except (TypeError, ValueError) as error:
            raise UnfitField(name, getattr(value, name), error) from error


def read(message: Any, kind: type[T]) -> T:
    """Return the dataclass that `message` holds, or raise ValueError."""
    return kind(**{name: way.get(message, name) for name, way in _ways(kind)})


class UnfitField(ValueError):
    """Value that a field cannot hold; `path` names the field from the outermost message."""

    def __init__(self, name: str, value: object, error: Exception) -> None:
        inner = error if isinstance(error, UnfitField) else None
        self.path: str = f"{name}.{inner.path}" if inner else name
        self.value: object = inner.value if inner else value
        self.problem: str = inner.problem if inner else str(error)
        super().__init__(f"{self.path}: {self.problem}")


class _Way(NamedTuple):
    put: Callable[[Any, str, Any], None]
    get: Callable[[Any, str], Any]


_known: dict[type, tuple[tuple[str, _Way], ...]] = {}


def _ways(kind: Any) -> tuple[tuple[str, _Way], ...]:
    if kind not in _known:
        hints = get_type_hints(kind)
        _known[kind] = tuple((field.name, _way(hints[field.name])) for field in dataclasses.fields(kind))
    return _known[kind]


def _way(hint: Any) -> _Way:
    origin, parts = get_origin(hint), get_args(hint)
    if type(None) in parts:
        [inner] = (part for part in parts if part is not type(None))
        return _optional_pairs(_way(inner)) if get_origin(inner) is Mapping else _OPTIONAL
    if origin is Mapping:
        return _pairs(*map(_way, parts), of=dict, items=Mapping.items)
    if dataclasses.is_dataclass(hint):
        return _nested(hint)
    if origin is not tuple:
        assert origin is Literal or hint in (str, bytes, int, float, bool), hint
        return _SINGULAR
    if get_origin(parts[0]) is tuple:
        return _pairs(*map(_way, get_args(parts[0])), of=tuple, items=iter)
    return _many(parts[0]) if dataclasses.is_dataclass(parts[0]) else _REPEATED


def _put_repeated(message: Any, name: str, value: Any) -> None:
    getattr(message, name).extend(value)


def _put_optional(message: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(message, name, value)


def _get_optional(message: Any, name: str) -> Any:
    return getattr(message, name) if message.HasField(name) else None


_SINGULAR = _Way(setattr, getattr)
_REPEATED = _Way(_put_repeated, lambda message, name: tuple(getattr(message, name)))
_OPTIONAL = _Way(_put_optional, _get_optional)


def _nested(kind: Any) -> _Way:
    def put(message: Any, name: str, value: Any) -> None:
        inner = getattr(message, name)
        inner.SetInParent()  # sets presence even if all fields are zero
        write(inner, value)

    def get(message: Any, name: str) -> Any:
        if not message.HasField(name):
            raise ValueError(f"{name} is missing")
        return read(getattr(message, name), kind)

    return _Way(put, get)


def _many(kind: Any) -> _Way:
    def put(message: Any, name: str, value: Any) -> None:
        for each in value:
            write(getattr(message, name).add(), each)

    return _Way(put, lambda message, name: tuple(read(each, kind) for each in getattr(message, name)))


def _pairs(first: _Way, second: _Way, *, of: Callable[[Any], Any], items: Callable[[Any], Any]) -> _Way:
    def put(message: Any, name: str, value: Any) -> None:
        one, other = _names(message, name)
        for key, each in items(value):
            pair = getattr(message, name).add()
            first.put(pair, one, key)
            second.put(pair, other, each)

    def get(message: Any, name: str) -> Any:
        one, other = _names(message, name)
        return of((first.get(pair, one), second.get(pair, other)) for pair in getattr(message, name))

    return _Way(put, get)


def _names(message: Any, name: str) -> tuple[str, str]:
    one, other = message.DESCRIPTOR.fields_by_name[name].message_type.fields
    return one.name, other.name


def _optional_pairs(way: _Way) -> _Way:
    def put(message: Any, name: str, value: Any) -> None:
        if value is not None:
            if not value:
                raise ValueError("must be None instead of empty")
            way.put(message, name, value)

    return _Way(put, lambda message, name: way.get(message, name) or None)
