"""Records of every kind, drawn by hypothesis from their fields' types."""

import struct
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from rlhfspec.messages.records import EvaluationReport, Load, Record, Sample, Score, StepReport

texts = st.text(st.characters(codec="utf-8"), max_size=20)
counts = st.integers(0, 2**64 - 1)
halves = st.integers(0, 2**32 - 1)
real = st.floats(allow_nan=False, allow_infinity=False)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {str: texts, int: counts, float: st.floats(), bool: st.booleans()}
HALVES = {"token_ids", "prompt_token_ids", "num_generated", "num_held"}  # of 32 bits on the wire
SECONDS = dict.fromkeys(
    ("step_seconds", "sequence_seconds", "prefill_seconds", "learning_seconds", "saved_seconds"),
    st.floats(0, allow_infinity=False),
)


def of_type(hint: Any, plain: Mapping[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in plain:
        return plain[hint]
    if is_dataclass(hint):
        return of_class(hint, plain)
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, types.UnionType):
        return st.none() | st.one_of(
            # that a job has no such number is null, not a mapping without any
            st.dictionaries(texts, plain[float], min_size=1, max_size=3) if get_origin(each) is Mapping
            else of_type(each, plain)
            for each in inner if each is not type(None)
        )  # fmt: skip
    if origin is Mapping:
        return st.dictionaries(of_type(inner[0], plain), of_type(inner[1], plain), max_size=3)
    assert origin is tuple, hint
    if inner[-1] is not ...:
        return st.tuples(*(of_type(each, plain) for each in inner))
    return st.lists(of_type(inner[0], plain), max_size=8).map(tuple)


def of_class(kind: Any, plain: Mapping[Any, st.SearchStrategy[Any]] = PLAIN, **given: Any) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    drawn = {
        field.name: of_type(hints[field.name], {**plain, int: halves} if field.name in HALVES else plain)
        for field in fields(kind) if field.name not in given
    }  # fmt: skip
    return st.builds(kind, **drawn, **given)


def lists(values: st.SearchStrategy[Any], number: int) -> st.SearchStrategy[Any]:
    return st.lists(values, min_size=number, max_size=number).map(tuple)


def samples_of(number: int) -> st.SearchStrategy[Sample]:
    floats = {name: lists(st.floats(), number) for name in ("log_probs", "tempered_log_probs")}
    tokens = {"token_ids": lists(halves, number), "weights_versions": lists(counts, number)}
    return of_class(Sample, **floats, **tokens, finish_reason=st.sampled_from(["stop", "length"]))


def loads_of(number: int) -> st.SearchStrategy[Load]:
    tokens = {name: lists(halves, number) for name in ("num_generated", "num_held")}
    return of_class(Load, **SECONDS, **tokens, sample_ids=lists(texts, number))


FINITE = {**PLAIN, float: real}
components = st.lists(st.tuples(texts, real), max_size=3).map(tuple)
STRATEGIES: dict[type[Record], st.SearchStrategy[Any]] = {kind: of_class(kind) for kind in get_args(Record)} | {
    Sample: st.integers(0, 8).flatmap(samples_of) | of_class(Sample, finish_reason=st.just("error")),
    Score: of_class(Score, values=of_type(tuple[float, ...], FINITE), components=components, error=st.just(""))
    | of_class(Score, components=components, error=st.just("the model gave NaN")),
    Load: st.integers(0, 8).flatmap(loads_of),
    StepReport: of_class(StepReport, FINITE),
    EvaluationReport: of_class(EvaluationReport, FINITE),
}
records: st.SearchStrategy[Record] = st.one_of(*STRATEGIES.values())
SAMPLE = Sample(
    id="sums/3/7/1", job="sums", step=3, prompt=7, replica=1, prompt_text="2+2=", prompt_token_ids=(50, 43),
    columns_json='{"answer": "4"}', text="4", token_ids=(52, 0), log_probs=(-0.5, -0.25),
    tempered_log_probs=(-0.5, -0.25), weights_versions=(2, 2), finish_reason="stop",
)  # fmt: skip
SCORE = Score(id="sums/3/7/1/reward", sample_id="sums/3/7/1", job="sums", step=3, stage="reward", values=(0.5,))


def bits(value: Any) -> Any:
    """Return the value with floats by bits: NaN equals itself, and 0.0 is not -0.0."""
    if is_dataclass(value):
        return type(value), tuple(bits(getattr(value, f.name)) for f in fields(value))
    if isinstance(value, tuple):
        return tuple(map(bits, value))
    if isinstance(value, dict):  # in its order
        return tuple((bits(key), bits(each)) for key, each in value.items())
    return struct.pack("<d", value) if isinstance(value, float) else (type(value), value)
