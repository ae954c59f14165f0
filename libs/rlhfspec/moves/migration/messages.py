"""Messages between the ends of a move, and their encoding.

Each names both processes by incarnation (new at every start) and the source's attempt number, which is never reused.

    "RLHFTELL" | header length, uint32 | header in JSON | fields of bytes | crc32 of all

| the source sends | the destination replies |
|---|---|
| Reserve | Reserved, Refused |
| Range | Copied, Refused |
| HandOver, Ask | Taken, Refused, Unknown |
| Abort | Refused |
| Settled | Taken, Unknown |
| anything to an ended process | Gone |
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from rlhfspec.errors import MalformedRecord

_MESSAGE_MAGIC = b"RLHFTELL"
_LENGTH = struct.Struct("<I")
_MESSAGE_KEY = "message"
_MOST_TEXT = 4096
_MOST_NUMBER = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveMessage:
    move: str
    sample: str
    number: int
    source: str
    destination: str

    def head(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(MoveMessage)}


# ---- sent by the source ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(MoveMessage):
    manifest: bytes
    weights_version: int
    has_kv: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Range(MoveMessage):
    """Announcement of KV that the link carries under `key`; `kv` is `to_bytes(KVRange, has_kv=False)`."""

    kv: bytes
    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver(MoveMessage):
    """Hand-over of a sequence stopped at its source; an empty `key` means no KV."""

    state: bytes  # without its KV
    kv: bytes
    key: str
    num_bytes: int
    prompt: bytes  # the record
    token: str  # to ack the record, or keep it in progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(MoveMessage):
    """Notice that the source will never hand over this attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(MoveMessage):
    """Question whether the attempt was taken; if not, it never will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(MoveMessage):
    """Notice that the source received Taken and released the sequence."""


# ---- sent by the destination -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved(MoveMessage):
    mark: bytes  # a Watermark of KV that need not be sent; empty for tokens only
    offer: str  # of the link


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(MoveMessage):
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(MoveMessage):
    """Reply that the destination owns or owned the sequence."""

    num_recomputed: int = 0  # tokens whose KV is recomputed


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(MoveMessage):
    """Final reply that this attempt was not and never will be taken."""

    field: str  # what does not fit
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown(MoveMessage): ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone(MoveMessage):
    """Reply of a newer process (incarnation `here`) in place of the ended destination."""

    here: str


Told = Reserve | Range | HandOver | Abort | Ask | Settled
Reply = Reserved | Copied | Taken | Refused | Unknown | Gone

_MESSAGE_TYPES: dict[str, type[MoveMessage]] = {
    each.__name__: each
    for each in (Reserve, Range, HandOver, Abort, Ask, Settled, Reserved, Copied, Taken, Refused, Unknown, Gone)
}
_FIELD_TYPES = {name: get_type_hints(kind) for name, kind in _MESSAGE_TYPES.items()}


def to_bytes(message: MoveMessage) -> bytes:
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    blobs = [value for value in values.values() if isinstance(value, bytes)]
    said = {name: len(value) if isinstance(value, bytes) else value for name, value in values.items()}
    header = json.dumps({_MESSAGE_KEY: type(message).__name__} | said, separators=(",", ":")).encode()
    body = b"".join((_MESSAGE_MAGIC, _LENGTH.pack(len(header)), header, *blobs))
    return body + _LENGTH.pack(zlib.crc32(body))


def from_bytes(data: bytes) -> Any:
    """Decode a `Told` or `Reply`, or raise MalformedRecord."""
    body, checksum = data[: -_LENGTH.size], data[-_LENGTH.size :]
    if _LENGTH.pack(zlib.crc32(body)) != checksum:
        raise MalformedRecord("its checksum does not match: bytes were changed or lost")
    try:
        return _read(body)
    except (ValueError, TypeError, LookupError, RecursionError, struct.error) as error:
        raise MalformedRecord(f"not a message about a move ({type(error).__name__}: {error})"[:200]) from error


def told(data: bytes) -> Told:
    message = from_bytes(data)
    if not isinstance(message, Told):
        raise MalformedRecord(f"{type(message).__name__} is not a request")
    return message


def reply(data: bytes) -> Reply:
    message = from_bytes(data)
    if not isinstance(message, Reply):
        raise MalformedRecord(f"{type(message).__name__} is not a reply")
    return message


def _read(body: bytes) -> MoveMessage:
    start = len(_MESSAGE_MAGIC) + _LENGTH.size
    if body[: len(_MESSAGE_MAGIC)] != _MESSAGE_MAGIC:
        raise ValueError(f"does not begin with {_MESSAGE_MAGIC.decode()}")
    (length,) = _LENGTH.unpack(body[len(_MESSAGE_MAGIC) : start])
    place = start + length
    values = json.loads(body[start:place])
    if not isinstance(values, dict):
        raise ValueError("the header is not an object")
    name = values.pop(_MESSAGE_KEY)
    types = _FIELD_TYPES[name]
    if values.keys() != types.keys():
        raise ValueError(f"{name} has missing or unknown fields")
    for field, kind in types.items():
        if kind is bytes:
            size = _number(field, values[field])
            values[field] = body[place : place + size]
            place += size
        elif kind is int:
            _number(field, values[field])
        elif type(values[field]) is not kind or (kind is str and len(values[field]) > _MOST_TEXT):
            raise ValueError(f"{field}: must be a {kind.__name__}")
    if place != len(body):
        raise ValueError("its length differs from the one in its header")
    return _MESSAGE_TYPES[name](**values)


def _number(field: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_NUMBER:
        raise ValueError(f"{field}: must be a number >= 0")
    return value
