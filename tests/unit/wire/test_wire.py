"""Records as bytes: nothing changes on the way, and no bytes raise anything but our own error."""

from __future__ import annotations

import dataclasses
import math
import random
import struct
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_records import SAMPLE, SCORE, STRATEGIES, records

from rlhfspec.errors import InvalidRequest, MalformedRecord
from rlhfspec.messages.records import Demand, Record
from rlhfspec.messages.wire.codec import ENVELOPE_FIELDS, decode, encode
from rlhfspec.messages.wire.records_pb2 import Envelope


def bits(value: Any) -> Any:
    """Like the value, but floats are compared by their bits: NaN equals itself, and 0.0 is not -0.0."""
    if dataclasses.is_dataclass(value):
        return type(value), tuple(bits(getattr(value, f.name)) for f in dataclasses.fields(value))
    if isinstance(value, tuple):
        return tuple(map(bits, value))
    return struct.pack("<d", value) if isinstance(value, float) else (type(value), value)


def test_every_record_has_a_strategy_and_a_place_in_the_envelope() -> None:
    assert set(STRATEGIES) == set(get_args(Record)) == set(ENVELOPE_FIELDS)


@pytest.mark.parametrize("record_type", STRATEGIES, ids=lambda kind: kind.__name__)
def test_message_has_the_record_s_fields(record_type: type[Record]) -> None:
    field = Envelope.DESCRIPTOR.fields_by_name[ENVELOPE_FIELDS[record_type]]
    assert [f.name for f in field.message_type.fields] == [f.name for f in dataclasses.fields(record_type)]


@pytest.mark.parametrize("record_type", STRATEGIES, ids=lambda kind: kind.__name__)
def test_round_trip_changes_nothing(record_type: type[Record]) -> None:
    @given(STRATEGIES[record_type])
    def changes_nothing(record: Record) -> None:
        assert bits(decode(encode(record))) == bits(record)

    changes_nothing()


def test_a_record_of_nothing_but_zeros_and_empty_strings_is_one_too() -> None:
    nothing = Demand(id="", job="", step=0, round=0, num_prompts=0)
    assert decode(encode(nothing)) == nothing


@given(st.floats(width=32), st.floats())
def test_float32_and_float64_arrive_bit_for_bit(single: float, double: float) -> None:
    sample = dataclasses.replace(SAMPLE, log_probs=(single, -0.0), tempered_log_probs=(double, 5e-324))
    assert bits(decode(encode(sample))) == bits(sample)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_our_error(data: bytes) -> None:
    decode_or_refuse(data)


@given(records, st.randoms(use_true_random=False))
def test_damaged_bytes_raise_only_our_error(record: Record, chance: random.Random) -> None:
    data = bytearray(encode(record))
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data))
        match chance.randrange(4):
            case 0:
                data[place] ^= 1 << chance.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place:place] = chance.randbytes(3)
            case _:
                data += data[:place]
        if not data:
            return
    decode_or_refuse(bytes(data))


def decode_or_refuse(data: bytes) -> None:
    """What decodes is a record that encodes again; what does not, says so."""
    try:
        record = decode(data)
    except MalformedRecord:
        return
    assert bits(decode(encode(record))) == bits(record)


def test_unknown_fields_are_skipped() -> None:
    tag_of_field_99_as_text = bytes([0x9A, 0x06, 0x03]) + b"new"
    inner = Envelope.FromString(encode(SCORE)).score.SerializeToString() + tag_of_field_99_as_text
    envelope = bytes([0x1A, len(inner)]) + inner + tag_of_field_99_as_text
    assert decode(envelope) == SCORE


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "without a record that this version knows"),
        (bytes([0x9A, 0x06, 0x03]) + b"new", "without a record that this version knows"),
        (b"\xff\xff", "not protobuf"),
        (encode(SAMPLE)[:-1], "not protobuf"),
        (encode(SAMPLE).replace(b"stop", b"stup"), "Sample.finish_reason: must be one of stop, length, error"),
        (encode(SCORE).replace(b"reward", b"\xff\xfeward"), "not protobuf"),
        (encode(SCORE).replace(struct.pack("<d", 0.5), struct.pack("<d", math.nan)), "Score.values: must be finite"),
    ],
)
def test_malformed_bytes_say_what_is_wrong(data: bytes, problem: str) -> None:
    with pytest.raises(MalformedRecord, match=problem):
        decode(data)


@pytest.mark.parametrize(
    ("record", "field"),
    [
        (dataclasses.replace(SCORE, values=(0.0, math.nan)), "Score.values"),
        (dataclasses.replace(SCORE, values=(-math.inf,)), "Score.values"),
        (dataclasses.replace(SCORE, components=(("exact", math.inf),)), "Score.values"),
        (dataclasses.replace(SCORE, stage="judge"), "Score.stage"),  # type: ignore[arg-type]
        (dataclasses.replace(SAMPLE, step=-1), "Sample.step"),
        (dataclasses.replace(SAMPLE, token_ids=(0, 1 << 32)), "Sample.token_ids"),
        (dataclasses.replace(SAMPLE, token_ids=(0, 1.5)), "Sample.token_ids"),  # type: ignore[arg-type]
        (dataclasses.replace(SAMPLE, token_ids=(1, 2, 3)), "Sample.log_probs"),
        (dataclasses.replace(SAMPLE, tempered_log_probs=()), "Sample.tempered_log_probs"),
        (dataclasses.replace(SAMPLE, weights_versions=(3,)), "Sample.weights_versions"),
        (dataclasses.replace(SAMPLE, text="\ud800"), "Sample.text"),
        (dataclasses.replace(SAMPLE, job=None), "Sample.job"),  # type: ignore[arg-type]
    ],
)
def test_what_a_field_cannot_hold_is_refused_by_name(record: Record, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field.replace(".", r"\.")):
        encode(record)


def test_a_failed_score_may_say_what_it_got() -> None:
    failed = dataclasses.replace(SCORE, values=(math.nan,), error="the model gave NaN")
    assert bits(decode(encode(failed))) == bits(failed)
