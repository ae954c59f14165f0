"""Records to bytes and back, nothing changed on the way: an envelope around the protobuf message of each type.

The message of a type has the record's fields under the record's names, so that one rule translates them all.

Example:
    >>> from rlhfspec.messages.records import Demand
    >>> demand = Demand(id="sums/3/demand/1", job="sums", step=3, round=1, num_prompts=4)
    >>> decode(encode(demand)) == demand
    True
    >>> decode(b"no record")
    Traceback (most recent call last):
    ...
    rlhfspec.errors.MalformedRecord: malformed record: not protobuf: ...
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError

from rlhfspec.errors import InvalidRequest, MalformedRecord
from rlhfspec.messages.records import (
    DatasetInfo,
    Demand,
    EvaluationReport,
    Heartbeat,
    Load,
    Move,
    Moved,
    Plan,
    Prompt,
    Record,
    Sample,
    Score,
    StepReport,
    Weights,
    WorkerInfo,
)
from rlhfspec.messages.wire.records_pb2 import Envelope

# The envelope's field for each type of record.
ENVELOPE_FIELDS: dict[type[Record], str] = {
    Prompt: "prompt",
    Sample: "sample",
    Score: "score",
    Weights: "weights",
    Demand: "demand",
    Load: "load",
    StepReport: "step_report",
    Heartbeat: "heartbeat",
    DatasetInfo: "dataset_info",
    EvaluationReport: "evaluation_report",
    WorkerInfo: "worker_info",
    Move: "move",
    Moved: "moved",
    Plan: "plan",
}
_TYPES = {field: record_type for record_type, field in ENVELOPE_FIELDS.items()}
_FIELDS = {kind: tuple(field.name for field in dataclasses.fields(kind)) for kind in ENVELOPE_FIELDS}


def _choices_of(record_type: type[Record]) -> dict[str, tuple[str, ...]]:
    """The fields that hold one of a few words."""
    hints = get_type_hints(record_type)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def _optional_of(record_type: type[Record]) -> frozenset[str]:
    """The fields that may be None."""
    hints = get_type_hints(record_type)
    return frozenset(name for name, hint in hints.items() if type(None) in get_args(hint))


_CHOICES = {kind: _choices_of(kind) for kind in ENVELOPE_FIELDS}
_OPTIONAL = {kind.__name__: _optional_of(kind) for kind in ENVELOPE_FIELDS}


def encode(record: Record) -> bytes:
    """Raises `InvalidRequest`, naming the field, for a value that the field cannot hold."""
    if problem := _problem_of(record):
        raise InvalidRequest(*problem)
    envelope = Envelope()
    message = getattr(envelope, ENVELOPE_FIELDS[type(record)])
    for name in _FIELDS[type(record)]:
        value = getattr(record, name)
        try:
            _put(message, name, value)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{type(record).__name__}.{name}", value, str(error)) from error
    return envelope.SerializeToString()


def decode(data: bytes) -> Record:
    """Raises `MalformedRecord` for anything that `encode` of some version could not have made."""
    try:
        envelope = Envelope.FromString(data)
    except DecodeError as error:
        raise MalformedRecord(f"not protobuf: {error}") from error
    which = envelope.WhichOneof("record")
    if which is None:
        raise MalformedRecord("an envelope without a record that this version knows")
    record_type = _TYPES[which]
    message = getattr(envelope, which)
    record: Record = record_type(**{name: _get(message, name) for name in _FIELDS[record_type]})
    if problem := _problem_of(record):
        raise MalformedRecord(str(InvalidRequest(*problem)))
    return record


# Fields that hold pairs: what the two parts of a pair are called in the message.
_PAIRS = {"components": ("name", "value"), "experts": ("layer", "rows"), "strategies": ("name", "num_steps")}


def _put(message: Any, name: str, value: Any) -> None:
    if name in _PAIRS:
        for pair in value:
            getattr(message, name).add(**dict(zip(_PAIRS[name], pair, strict=True)))
    elif isinstance(value, tuple):
        getattr(message, name).extend(value)
    elif value is not None or name not in _OPTIONAL[type(message).__name__]:
        setattr(message, name, value)


def _get(message: Any, name: str) -> Any:
    value = getattr(message, name)
    if name in _PAIRS:
        first, second = _PAIRS[name]
        return tuple((getattr(pair, first), _plain(getattr(pair, second))) for pair in value)
    if name in _OPTIONAL[type(message).__name__] and not message.HasField(name):
        return None
    return _plain(value)


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else tuple(value)


def _problem_of(record: Record) -> tuple[str, object, str] | None:
    """Field, value and what is wrong with it: what protobuf's types cannot say."""
    for name, choices in _CHOICES[type(record)].items():
        if getattr(record, name) not in choices:
            return f"{type(record).__name__}.{name}", getattr(record, name), f"must be one of {', '.join(choices)}"
    if isinstance(record, Sample) and record.finish_reason != "error":
        for name in ("log_probs", "tempered_log_probs", "weights_versions"):
            if len(getattr(record, name)) != len(record.token_ids):
                return f"Sample.{name}", record.id, f"must have a number for each of {len(record.token_ids)} tokens"
    if isinstance(record, Load):
        for name in ("num_generated", "num_held"):
            if len(getattr(record, name)) != len(record.sample_ids):
                return f"Load.{name}", record.id, f"must have a number for each of {len(record.sample_ids)} samples"
        for name in ("step_seconds", "sequence_seconds", "prefill_seconds"):
            if not 0 <= getattr(record, name) < math.inf:
                return f"Load.{name}", getattr(record, name), "must be a number of seconds"
    if isinstance(record, Score) and not record.error:
        numbers = [*record.values, *(value for _, value in record.components)]
        if not all(map(math.isfinite, numbers)):
            return "Score.values", record.id, "must be finite where no error says why they are not"
    return None
