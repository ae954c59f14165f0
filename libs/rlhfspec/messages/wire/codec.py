"""Lossless encoding of records as protobuf messages in an envelope."""

from __future__ import annotations

import math
from typing import Literal, get_args, get_origin, get_type_hints

from google.protobuf.message import DecodeError
from pydantic.alias_generators import to_snake

from rlhfspec.errors import InvalidRequest, MalformedRecord
from rlhfspec.messages.records import EvaluationReport, Load, Record, Sample, Score, StepReport
from rlhfspec.messages.records.metrics import not_finite
from rlhfspec.messages.wire.fields import UnfitField, read, write
from rlhfspec.messages.wire.records_pb2 import Envelope

# The envelope's field for each record type.
ENVELOPE_FIELDS: dict[type[Record], str] = {kind: to_snake(kind.__name__) for kind in get_args(Record)}
_RECORD_TYPES = {field: record_type for record_type, field in ENVELOPE_FIELDS.items()}
_CHOICES: dict[type[Record], dict[str, tuple[str, ...]]] = {  # allowed values of each Literal field
    kind: {name: get_args(hint) for name, hint in get_type_hints(kind).items() if get_origin(hint) is Literal}
    for kind in ENVELOPE_FIELDS
}


def encode(record: Record) -> bytes:
    """Encode a record, or raise `InvalidRequest` for an invalid value."""
    if problem := _problem_of(record):
        raise InvalidRequest(*problem)
    envelope = Envelope()
    message = getattr(envelope, ENVELOPE_FIELDS[type(record)])
    try:
        write(message, record)
    except UnfitField as unfit:
        raise InvalidRequest(f"{type(record).__name__}.{unfit.path}", unfit.value, unfit.problem) from unfit
    return envelope.SerializeToString()


def decode(data: bytes) -> Record:
    """Decode a record; raise `MalformedRecord` for invalid bytes."""
    try:
        envelope = Envelope.FromString(data)
    except DecodeError as error:
        raise MalformedRecord(f"not protobuf: {error}") from error
    which = envelope.WhichOneof("record")
    if which is None:
        raise MalformedRecord("an envelope without a record that this version knows")
    record_type = _RECORD_TYPES[which]
    message = getattr(envelope, which)
    try:
        record: Record = read(message, record_type)
    except ValueError as error:
        raise MalformedRecord(f"{record_type.__name__}: {error}") from error
    if problem := _problem_of(record):
        raise MalformedRecord(str(InvalidRequest(*problem)))
    return record


def _problem_of(record: Record) -> tuple[str, object, str] | None:
    """Return (field, value, problem) of the first violated constraint, or None."""
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
                return f"Load.{name}", getattr(record, name), "must be a finite number of seconds >= 0"
    if isinstance(record, Score) and not record.error:
        numbers = [*record.values, *(value for _, value in record.components)]
        if not all(map(math.isfinite, numbers)):
            return "Score.values", record.id, "must be finite unless error is set"
    if isinstance(record, StepReport | EvaluationReport) and (found := not_finite(record)) is not None:
        return f"{type(record).__name__}.{found[0]}", found[1], "must be finite"
    return None
