"""What the two ends of a move say to each other, as bytes and back.

The source tells, the destination replies. Every message names the move, the sample, both processes by their
incarnation (new with every start), and a number that the source's process gives each of its attempts and never again.

    "RLHFTELL" | length of the header, uint32 | header in JSON | fields of bytes, one behind the other | crc32 of all

Manifests, states and KV are bytes here, in the format of `engine.state_bytes`: the engine reads and judges them. KV
itself is in no message; it comes over a link, under a key.

| the source tells | the destination replies |
|---|---|
| Reserve | Reserved, Refused |
| Range | Copied, Refused |
| HandOver, Ask | Taken, Refused, Unknown |
| Abort | Refused |
| Settled | Taken, Unknown |
| anything to a process that is no more | Gone |

Example:
    >>> ends = {"move": "m", "sample": "sums/3/7/1", "number": 4, "source": "a1", "destination": "b7"}
    >>> from_bytes(to_bytes(Ask(**ends))) == Ask(**ends)
    True
    >>> from_bytes(to_bytes(Ask(**ends))[:-1])
    Traceback (most recent call last):
    ...
    rlhfspec.errors.MalformedRecord: malformed record: its checksum is another one: bytes were changed or lost
"""

from __future__ import annotations

import json
import struct
import zlib
from dataclasses import dataclass, fields
from typing import Any, get_type_hints

from rlhfspec.errors import MalformedRecord

_MAGIC = b"RLHFTELL"
_LENGTH = struct.Struct("<I")
_NAME = "message"
_MOST_TEXT = 4096
_MOST_NUMBER = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveMessage:
    """The head of all of them. `number`: of the attempt, unique for the source's incarnation and growing."""

    move: str
    sample: str
    number: int
    source: str
    destination: str

    def head(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(MoveMessage)}


# ---- the source tells -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve(MoveMessage):
    """Without `has_kv` the tokens alone will come: no memory is kept for them."""

    manifest: bytes
    weights_version: int
    has_kv: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Range(MoveMessage):
    """KV that lies at the link under `key`; `kv` says what it is (`to_bytes(KVRange, has_kv=False)`)."""

    kv: bytes
    key: str
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver(MoveMessage):
    """The sequence stands still at its source. With an empty `key` no KV comes with it any more."""

    state: bytes  # without its KV
    kv: bytes
    key: str
    num_bytes: int
    prompt: bytes  # the record, and ...
    token: str  # ... with what it is acknowledged, or kept in progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(MoveMessage):
    """The source goes on with it; this attempt will never be handed over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask(MoveMessage):
    """Was it taken? If not, it never will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled(MoveMessage):
    """The source heard that it was taken, and has let go of it."""


# ---- the destination replies ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved(MoveMessage):
    mark: bytes  # a Watermark: what need not be sent; empty for tokens alone
    offer: str  # of the link


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied(MoveMessage):
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken(MoveMessage):
    """It runs here, or did."""

    num_recomputed: int = 0  # tokens whose KV is computed again


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(MoveMessage):
    """This attempt has not been taken and never will be, whatever else of it arrives."""

    field: str  # what does not fit
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown(MoveMessage):
    """So long ago that this process does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone(MoveMessage):
    """The process that is meant is no more: `here` has taken its place, and nothing of it."""

    here: str


Told = Reserve | Range | HandOver | Abort | Ask | Settled
Reply = Reserved | Copied | Taken | Refused | Unknown | Gone

_KINDS: dict[str, type[MoveMessage]] = {
    each.__name__: each
    for each in (Reserve, Range, HandOver, Abort, Ask, Settled, Reserved, Copied, Taken, Refused, Unknown, Gone)
}
_TYPES = {name: get_type_hints(kind) for name, kind in _KINDS.items()}


def to_bytes(message: MoveMessage) -> bytes:
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    blobs = [value for value in values.values() if isinstance(value, bytes)]
    said = {name: len(value) if isinstance(value, bytes) else value for name, value in values.items()}
    header = json.dumps({_NAME: type(message).__name__} | said, separators=(",", ":")).encode()
    body = b"".join((_MAGIC, _LENGTH.pack(len(header)), header, *blobs))
    return body + _LENGTH.pack(zlib.crc32(body))


def from_bytes(data: bytes) -> Any:
    """A `Told` or a `Reply`. Raises MalformedRecord, whatever the bytes are; nothing in them is executed."""
    body, checksum = data[: -_LENGTH.size], data[-_LENGTH.size :]
    if _LENGTH.pack(zlib.crc32(body)) != checksum:
        raise MalformedRecord("its checksum is another one: bytes were changed or lost")
    try:
        return _read(body)
    except (ValueError, TypeError, LookupError, RecursionError, struct.error) as error:
        raise MalformedRecord(f"no message of a move ({type(error).__name__}: {error})"[:200]) from error


def told(data: bytes) -> Told:
    message = from_bytes(data)
    if not isinstance(message, Told):
        raise MalformedRecord(f"{type(message).__name__} is no question")
    return message


def reply(data: bytes) -> Reply:
    message = from_bytes(data)
    if not isinstance(message, Reply):
        raise MalformedRecord(f"{type(message).__name__} is no reply")
    return message


def _read(body: bytes) -> MoveMessage:
    start = len(_MAGIC) + _LENGTH.size
    if body[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"does not begin with {_MAGIC.decode()}")
    (length,) = _LENGTH.unpack(body[len(_MAGIC) : start])
    place = start + length
    values = json.loads(body[start:place])
    if not isinstance(values, dict):
        raise ValueError("a header that is none")
    name = values.pop(_NAME)
    types = _TYPES[name]
    if values.keys() != types.keys():
        raise ValueError(f"{name} of other fields")
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
        raise ValueError("other bytes than it says")
    return _KINDS[name](**values)


def _number(field: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MOST_NUMBER:
        raise ValueError(f"{field}: must be a number >= 0")
    return value
