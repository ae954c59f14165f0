"""Records as bytes: nothing changes on the way, and no bytes raise anything but our own error."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfspec.errors import InvalidRequest, MalformedRecord
from rlhfspec.records import (
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
from rlhfspec.wire.codec import ENVELOPE_FIELDS, decode, encode
from rlhfspec.wire.records_pb2 import Envelope

ROOT = Path(__file__).parent.parent
texts = st.text(st.characters(codec="utf-8"), max_size=20)
counts = st.integers(0, 2**64 - 1)
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=8).map(tuple)
finite = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=8).map(tuple)
numbers = st.lists(st.floats(), max_size=8).map(tuple)
seconds = st.floats(0, allow_infinity=False)
moves = {"id": texts, "job": texts, "sample_id": texts, "source": counts, "destination": counts}
named = {"id": texts, "job": texts, "step": counts}
purposes = st.sampled_from(["training", "evaluation"])
placed = {**named, "purpose": purposes, "prompt": counts, "replica": counts, "columns_json": texts}
components = st.lists(st.tuples(texts, st.floats(allow_nan=False, allow_infinity=False)), max_size=3).map(tuple)
scores = {**named, "purpose": purposes, "sample_id": texts, "stage": st.sampled_from(["reward", "reference", "critic"])}
said = {
    **placed,
    "prompt_text": texts,
    "prompt_token_ids": tokens,
    "text": texts,
    "token_ids": tokens,
    "log_probs": numbers,
    "tempered_log_probs": numbers,
    "weights_versions": st.lists(counts, max_size=8).map(tuple),
    "error": texts,
    "num_verifications": counts,
    "num_drafted": counts,
    "num_accepted": counts,
    "strategies": st.lists(st.tuples(texts, counts), max_size=3).map(tuple),
    "experts": st.lists(st.tuples(texts, st.lists(counts).map(tuple))).map(tuple),
    "seconds": st.floats(),
    "generator": texts,
}


def samples_of(num_tokens: int) -> st.SearchStrategy[Sample]:
    def each(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(values, min_size=num_tokens, max_size=num_tokens).map(tuple)

    of_tokens = {
        "token_ids": each(st.integers(0, 2**32 - 1)),
        "log_probs": each(st.floats()),
        "tempered_log_probs": each(st.floats()),
        "weights_versions": each(counts),
    }
    return st.builds(Sample, **said | of_tokens, finish_reason=st.sampled_from(["stop", "length"]))


STRATEGIES: dict[type[Record], st.SearchStrategy[Any]] = {
    Prompt: st.builds(Prompt, **placed, text=texts, token_ids=tokens, seed=counts, weights_version=counts),
    Sample: st.integers(0, 8).flatmap(samples_of) | st.builds(Sample, **said, finish_reason=st.just("error")),
    Score: st.builds(Score, **scores, values=finite, components=components, weights_version=counts, seconds=st.floats())
    | st.builds(Score, **scores, values=numbers, components=components, error=st.just("the model gave NaN")),
    Weights: st.builds(
        Weights,
        id=texts,
        job=texts,
        version=counts,
        role=st.sampled_from(["policy", "critic"]),
        uri=texts,
        digest=texts,
    ),
    DatasetInfo: st.builds(
        DatasetInfo,
        id=texts,
        job=texts,
        num_prompts=counts,
        num_held_out=counts,
        last_step=counts,
        columns_json=texts,
    ),
    WorkerInfo: st.builds(
        WorkerInfo,
        id=texts,
        job=texts,
        stage=texts,
        worker=counts,
        host=texts,
        pid=counts,
        grpc_address=texts,
        http_address=texts,
        models_json=texts,
        moves_address=texts,
    ),
    Demand: st.builds(Demand, **named, round=counts, num_prompts=counts),
    Load: st.integers(0, 8).flatmap(
        lambda number: st.builds(
            Load,
            **named,
            worker=counts,
            incarnation=texts,
            host=texts,
            weights_version=counts,
            is_leaving=st.booleans(),
            step_seconds=seconds,
            sequence_seconds=seconds,
            prefill_seconds=seconds,
            prefill_tokens=counts,
            num_free_rows=counts,
            num_free_tokens=counts,
            num_prefilled=counts,
            num_found=counts,
            sample_ids=st.lists(texts, min_size=number, max_size=number).map(tuple),
            num_generated=st.lists(st.integers(0, 2**32 - 1), min_size=number, max_size=number).map(tuple),
            num_held=st.lists(st.integers(0, 2**32 - 1), min_size=number, max_size=number).map(tuple),
            generator=texts,
            num_running=counts,
            num_waiting=counts,
            num_finished=counts,
            num_tokens=counts,
            tokens_per_second=st.floats(),
            accepted_per_verification=st.none() | st.floats(),
            strategy=texts,
        )
    ),
    Move: st.builds(Move, **moves, gain_seconds=st.floats(), reason=texts),
    Moved: st.builds(
        Moved,
        **moves,
        how=st.sampled_from(["kv", "tokens", "kept", "lost"]),
        reason=texts,
        num_bytes=counts,
        num_rounds=counts,
        num_tokens=counts,
        num_recomputed=counts,
        pause_seconds=st.floats(),
    ),
    Plan: st.builds(Plan, id=texts, job=texts, plan_json=texts),
    Heartbeat: st.builds(
        Heartbeat,
        id=texts,
        job=texts,
        stage=texts,
        worker=counts,
        doing=st.sampled_from(["working", "waiting", "stopped"]),
        what=texts,
        since_seconds=st.floats(),
        overdue_seconds=st.floats(),
        busy_seconds=st.floats(),
    ),
    EvaluationReport: st.builds(EvaluationReport, **named, metrics_json=texts),
    StepReport: st.builds(StepReport, **named, weights_version=counts, weights_digest=texts, metrics_json=texts),
}
records: st.SearchStrategy[Record] = st.one_of(*STRATEGIES.values())


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


SAMPLE = Sample(
    id="sums/3/7/1", job="sums", step=3, prompt=7, replica=1, prompt_text="2+2=", prompt_token_ids=(50, 43),
    columns_json='{"answer": "4"}', text="4", token_ids=(52, 0), log_probs=(-0.5, -0.25),
    tempered_log_probs=(-0.5, -0.25), weights_versions=(2, 2), finish_reason="stop",
)  # fmt: skip
SCORE = Score(id="sums/3/7/1/reward", sample_id="sums/3/7/1", job="sums", step=3, stage="reward", values=(0.5,))


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


def test_generated_code_is_what_the_proto_says(tmp_path: Path) -> None:
    assert importlib.util.find_spec("grpc_tools"), "grpcio-tools is part of the development environment"
    out = [f"--python_out={tmp_path}", f"--pyi_out={tmp_path}"]
    source = "protos/rlhfspec/wire/records.proto"
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", *out, source], cwd=ROOT, check=True)
    for name in ("records_pb2.py", "records_pb2.pyi"):
        made = (tmp_path / "rlhfspec" / "wire" / name).read_text()
        assert made == (ROOT / "libs" / "rlhfspec" / "wire" / name).read_text(), "the command is in records.proto"


def test_the_wire_needs_no_torch() -> None:
    modules = "rlhfspec.wire.codec, rlhfspec.transport.memory, rlhfspec.service.supervisor, rlhfspec.service.bus"
    subprocess.run([sys.executable, "-c", f"import {modules}, sys; sys.exit('torch' in sys.modules)"], check=True)
