"""Serialization of moving sequences: a JSON header, raw arrays, and a checksum of both.

    "RLHFMOVE" | length of the header, uint32 | header | concatenated arrays | xxh3_64 of all before

Reading executes no code. KV sent separately is left out (`has_kv=False`) and passed to `from_bytes` without a copy.

>>> mark, kv = Watermark(epoch=1, positions=(2,)), (np.zeros((3, 8), np.uint8),)
>>> kv = KVRange(request_id="a", start=mark, kv=kv, checksum=checksum_of(kv))
>>> from_bytes(to_bytes(kv)).end
Watermark(epoch=1, positions=(5,))
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from rlhfspec.engine.base import KVRange, Manifest, Request, SequenceState, Watermark
from rlhfspec.engine.params import SamplingParams
from rlhfspec.errors import InvalidRequest, MalformedRecord

Buffer = bytes | bytearray | memoryview
Travels = Manifest | Watermark | KVRange | SequenceState

_STATE_MAGIC = b"RLHFMOVE"
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<Q")
_RECORDS = {each.__name__: each for each in (Manifest, Watermark, KVRange, SequenceState, Request, SamplingParams)}
_ARRAY_DTYPES = {name: np.dtype(name) for name in ("uint8", "int32", "float32")}
_SCALARS = frozenset((int, float, str, bool, type(None)))  # JSON scalars
_RECORD, _ARRAY = "record", "array"


def checksum_of(parts: Iterable[Any]) -> int:
    total = xxhash.xxh3_64()
    for part in parts:
        total.update(part)
    return total.intdigest()


def to_bytes(record: Travels, *, has_kv: bool = True) -> bytes:
    arrays: list[npt.NDArray[Any]] = []
    content = _lower(record, arrays)
    shapes = [[array.dtype.name, array.shape] for array in arrays]
    header = json.dumps({"content": content, "arrays": shapes}, separators=(",", ":")).encode()
    inside = arrays if has_kv or not isinstance(record, KVRange) else []
    parts: list[Buffer] = [_STATE_MAGIC, _LENGTH.pack(len(header)), header]
    parts += [np.ascontiguousarray(array).data for array in inside]
    return b"".join((*parts, _CHECKSUM.pack(checksum_of(parts))))


def from_bytes(data: Buffer, kv: Buffer | None = None) -> Travels:
    """Read a record; `kv` is a KVRange's separate KV, not verified here. Raise MalformedRecord or InvalidRequest."""
    view = memoryview(data).toreadonly()
    body, checksum = view[: -_CHECKSUM.size], view[-_CHECKSUM.size :]
    if len(checksum) != _CHECKSUM.size or _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body)) != checksum:
        raise MalformedRecord("its checksum does not match: bytes were changed or lost")
    try:
        return _read(body, None if kv is None else memoryview(kv).toreadonly())
    except InvalidRequest:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, struct.error) as error:
        raise MalformedRecord(f"not a record of a sequence ({type(error).__name__}: {error})") from error


def _read(body: memoryview, kv: memoryview | None) -> Travels:
    start = len(_STATE_MAGIC) + _LENGTH.size
    if body[: len(_STATE_MAGIC)] != _STATE_MAGIC:
        raise ValueError(f"does not begin with {_STATE_MAGIC.decode()}")
    (length,) = _LENGTH.unpack(body[len(_STATE_MAGIC) : start])
    end = start + length
    header = json.loads(bytes(body[start:end]))
    if kv is not None and len(body) != end:
        raise ValueError("holds KV, although its KV was sent separately")
    inside, place = (body, end) if kv is None else (kv, 0)
    arrays = []
    for name, shape in header["arrays"]:
        if not all(type(length) is int and length >= 0 for length in shape):
            raise ValueError(f"an array has the invalid shape {shape}")
        dtype, count = _ARRAY_DTYPES[name], math.prod(shape)
        arrays.append(np.frombuffer(inside, dtype, count, place).reshape(shape))
        place += count * dtype.itemsize
    if place != len(inside):
        raise ValueError(f"{len(inside) - place} bytes too many")
    record = _raise(header["content"], arrays)
    if not isinstance(record, Travels):
        raise TypeError(f"{type(record).__name__} cannot be sent on its own")
    return record


def _lower(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    if is_dataclass(value):
        content = {field.name: _lower(getattr(value, field.name), arrays) for field in fields(value)}
        return {_RECORD: type(value).__name__} | content
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, tuple | list) and not _SCALARS.issuperset(map(type, value)):  # fast path for many token ids
        return [_lower(each, arrays) for each in value]
    return value


def _raise(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return tuple(value if _SCALARS.issuperset(map(type, value)) else (_raise(each, arrays) for each in value))
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return arrays[value[_ARRAY]]
    content = {name: _raise(each, arrays) for name, each in value.items() if name != _RECORD}
    return _RECORDS[value[_RECORD]](**content)
