"""What travels of a moving sequence, as bytes and back: a header in JSON, arrays as they lie, and a checksum of both.

    "RLHFMOVE" | length of the header, uint32 | header | arrays, one behind the other | crc32 of all before

Reading executes nothing and believes nothing: a damaged byte is refused by the checksum, a header that is no record of
ours by its types; whether the record fits this engine is for `arrival.py` to say.

Example:
    >>> kv = KVRange(request_id="a", start=Watermark(epoch=1, positions=(2,)), kv=(np.zeros((3, 8), np.uint8),))
    >>> from_bytes(to_bytes(kv)).end
    Watermark(epoch=1, positions=(5,))
    >>> from_bytes(to_bytes(kv)[:-1])
    Traceback (most recent call last):
    ...
    rlhfspec.errors.MalformedRecord: malformed record: its checksum is another one: bytes were changed or lost
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rlhfspec.engine.base import KVRange, Manifest, Request, SequenceState, Watermark
from rlhfspec.engine.params import SamplingParams
from rlhfspec.errors import InvalidRequest, MalformedRecord

Travels = Manifest | Watermark | KVRange | SequenceState

_MAGIC = b"RLHFMOVE"
_LENGTH = struct.Struct("<I")
_CHECKSUM = struct.Struct("<I")
_RECORDS = {each.__name__: each for each in (Manifest, Watermark, KVRange, SequenceState, Request, SamplingParams)}
_DTYPES = {name: np.dtype(name) for name in ("uint8", "int32", "float32")}
_RECORD, _ARRAY = "record", "array"


def to_bytes(record: Travels) -> bytes:
    arrays: list[npt.NDArray[Any]] = []
    content = _lower(record, arrays)
    shapes = [[array.dtype.name, array.shape] for array in arrays]
    header = json.dumps({"content": content, "arrays": shapes}, separators=(",", ":")).encode()
    parts = [_MAGIC, _LENGTH.pack(len(header)), header, *(array.tobytes() for array in arrays)]
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join((*parts, _CHECKSUM.pack(checksum)))


def from_bytes(data: bytes | bytearray | memoryview) -> Travels:
    """Raises MalformedRecord, or InvalidRequest naming the field of a request that can run nowhere."""
    view = memoryview(data)
    body, checksum = view[: -_CHECKSUM.size], view[-_CHECKSUM.size :]
    if _CHECKSUM.pack(zlib.crc32(body)) != checksum:
        raise MalformedRecord("its checksum is another one: bytes were changed or lost")
    try:
        return _read(body)
    except InvalidRequest:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, struct.error) as error:
        raise MalformedRecord(f"no record of a sequence ({type(error).__name__}: {error})") from error


def _read(body: memoryview) -> Travels:
    start = len(_MAGIC) + _LENGTH.size
    if body[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"does not begin with {_MAGIC.decode()}")
    (length,) = _LENGTH.unpack(body[len(_MAGIC) : start])
    header = json.loads(bytes(body[start : start + length]))
    arrays, place = [], start + length
    for name, shape in header["arrays"]:
        dtype, count = _DTYPES[name], math.prod(shape)
        arrays.append(np.frombuffer(body, dtype, count, place).reshape(shape))
        place += count * dtype.itemsize
    if place != len(body):
        raise ValueError(f"{len(body) - place} bytes too many")
    record = _raise(header["content"], arrays)
    if not isinstance(record, Travels):
        raise TypeError(f"{type(record).__name__} does not travel alone")
    return record


def _lower(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    """A record as what JSON can say; its arrays are put aside."""
    if is_dataclass(value):
        content = {field.name: _lower(getattr(value, field.name), arrays) for field in fields(value)}
        return {_RECORD: type(value).__name__} | content
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {_ARRAY: len(arrays) - 1}
    if isinstance(value, tuple | list):
        return [_lower(each, arrays) for each in value]
    return value


def _raise(value: Any, arrays: list[npt.NDArray[Any]]) -> Any:
    if isinstance(value, list):
        return tuple(_raise(each, arrays) for each in value)
    if not isinstance(value, dict):
        return value
    if _ARRAY in value:
        return arrays[value[_ARRAY]]
    content = {name: _raise(each, arrays) for name, each in value.items() if name != _RECORD}
    return _RECORDS[value[_RECORD]](**content)
