import dataclasses
import math
import struct
from dataclasses import replace
from typing import Any, get_args, get_type_hints

import pytest
from example_records import example_evaluation
from hypothesis import given, strategies as st
from wire_records import SAMPLE, SCORE, STRATEGIES, bits

from rlhfspec.errors import InvalidRequest, MalformedRecord
from rlhfspec.messages.records import Demand, EvaluationReport, Plan, Record, StepReport
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.messages.wire.codec import ENVELOPE_FIELDS, decode, encode
from rlhfspec.messages.wire.records_pb2 import Envelope


def test_every_record_has_a_strategy_and_a_place_in_the_envelope() -> None:
    assert set(STRATEGIES) == set(get_args(Record)) == set(ENVELOPE_FIELDS)


@pytest.mark.parametrize("record_type", STRATEGIES, ids=lambda kind: kind.__name__)
def test_a_message_has_the_fields_of_its_record(record_type: type[Record]) -> None:
    assert not unlike(Envelope.DESCRIPTOR.fields_by_name[ENVELOPE_FIELDS[record_type]].message_type, record_type)


def unlike(message: Any, kind: Any) -> list[str]:
    hints = get_type_hints(kind)
    told, names = ([f.name for f in each] for each in (message.fields, dataclasses.fields(kind)))
    found = [] if told == names else [f"{kind.__name__}: {told} are not {names}"]
    for field in message.fields:
        for inner in (hints[field.name], *get_args(hints[field.name])):
            if dataclasses.is_dataclass(inner):
                types = (field.message_type, *(f.message_type for f in field.message_type.fields if f.message_type))
                found += unlike(next(each for each in types if each.name == inner.__name__), inner)
    return found


def test_nothing_on_the_wire_is_json_but_the_rows_of_the_user_s_data() -> None:
    messages = [field.message_type for field in Envelope.DESCRIPTOR.fields]
    told = {f"{message.name}.{f.name}" for message in messages for f in message.fields if f.name.endswith("_json")}
    assert told == {"Prompt.columns_json", "Sample.columns_json"}


def test_lines_made_of_what_arrives_have_the_same_bytes() -> None:
    step = replace(example_step(step=3), kl={"k3": 0.125, "k1": -0.25}, learning={"z": 1.5, "a": 1e-300})
    told = decode(encode(StepReport(id="sums/3/report", job="sums", metrics=step)))
    assert told.metrics.to_line() == step.to_line()
    evaluation = replace(example_evaluation(step=3), reward_components={"format": 0.5, "exact": 0.1})
    done = decode(encode(EvaluationReport(id="sums/3/evaluation", job="sums", evaluation=evaluation)))
    assert done.evaluation.to_line() == evaluation.to_line()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_report_whose_numbers_are_not_finite_is_refused_on_both_sides(number: float) -> None:
    spread = replace(example_step().reward, mean=number)
    report = StepReport(id="sums/3/report", job="sums", metrics=replace(example_step(), reward=spread))
    with pytest.raises(InvalidRequest, match=r"StepReport\.metrics\.reward\.mean: "):
        encode(report)
    whole = encode(replace(report, metrics=replace(example_step(), entropy=0.123)))
    with pytest.raises(MalformedRecord, match=r"StepReport\.metrics\.entropy: must be finite"):
        decode(whole.replace(struct.pack("<d", 0.123), struct.pack("<d", number)))


def test_a_report_without_its_metrics_is_malformed() -> None:
    envelope = Envelope()
    envelope.step_report.id = "sums/3/report"
    with pytest.raises(MalformedRecord, match="StepReport: metrics is missing"):
        decode(envelope.SerializeToString())
    envelope.step_report.metrics.step = 3
    with pytest.raises(MalformedRecord, match="StepReport: reward is missing"):
        decode(envelope.SerializeToString())


@pytest.mark.parametrize("record_type", STRATEGIES, ids=lambda kind: kind.__name__)
def test_round_trip_changes_nothing(record_type: type[Record]) -> None:
    @given(STRATEGIES[record_type])
    def changes_nothing(record: Record) -> None:
        assert bits(decode(encode(record))) == bits(record)

    changes_nothing()


def test_a_record_of_zeros_and_empty_strings_round_trips() -> None:
    nothing = Demand(id="", job="", step=0, round=0, num_prompts=0)
    assert decode(encode(nothing)) == nothing


@given(st.floats(width=32), st.floats())
def test_float32_and_float64_arrive_bit_for_bit(single: float, double: float) -> None:
    sample = dataclasses.replace(SAMPLE, log_probs=(single, -0.0), tempered_log_probs=(double, 5e-324))
    assert bits(decode(encode(sample))) == bits(sample)


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
        (StepReport(id="", job="", metrics=replace(example_step(), kl={})), "StepReport.metrics.kl"),
        (StepReport(id="", job="", metrics=example_step(step=-1)), "StepReport.metrics.step"),
        (Plan(id="", job="", dry={-1: "score"}), "Plan.dry"),
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
def test_a_value_that_a_field_cannot_hold_is_refused_by_name(record: Record, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field.replace(".", r"\.")):
        encode(record)


def test_a_failed_score_may_carry_nan_values() -> None:
    failed = dataclasses.replace(SCORE, values=(math.nan,), error="the model gave NaN")
    assert bits(decode(encode(failed))) == bits(failed)
