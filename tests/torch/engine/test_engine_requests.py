"""Requests are checked at submission, so that no step ever raises."""

import copy
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from moving import VOCAB, drain, make, model, request

from rlhfspec.engine import Engine, Request, SamplingParams, oracle
from rlhfspec.errors import InvalidRequest, WeightsVersionError

GOOD: dict[str, Any] = {"id": "a", "prompt_token_ids": (1, 2, 3), "seed": 7, "group": "g", "history": ((4, 5),)}
FINE: dict[str, Any] = {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "max_tokens": 8, "stop_token_ids": (60,)}
STRANGE: list[Any] = [
    None, True, False, 0, -1, 1.5, -0.0, float("nan"), float("inf"), 1e39, 3.5e38, 1e-50, 1e-46, 1e-38, 2**31, 2**64,
    2**200, -(2**63), "", "x", b"x", (), (1.5,), ("a",), (None,), (True,), (-1,), (VOCAB,), (10**12,), [1, 2], {1: 2},
    ((1, 2.5),), ((VOCAB,),), (("a",),), np.int64(3), np.float32(0.5), np.uint8(200), object(),
]  # fmt: skip


NEIGHBOUR = request("neighbour", (9, 8, 7), seed=5, max_tokens=12)


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine with both drafters, which requests reach too."""
    return make(max_sequences=4, max_context=64, speculation="adaptive")


def accepted(engine: Engine, fields: dict[str, Any], params: dict[str, Any]) -> Request | None:
    try:
        request = Request(params=SamplingParams(**params), **fields)
        engine.submit(request)
    except WeightsVersionError:
        return None
    except InvalidRequest as error:
        if error.field not in fields | params:
            raise
        return None
    return request


@pytest.mark.parametrize("field", [*GOOD, "weights_version", *FINE, "stop", "ignore_eos"])
def test_a_strange_value_is_refused_by_its_name_or_runs(engine: Engine, field: str) -> None:
    for value in STRANGE:
        inside = field in GOOD or field == "weights_version"
        fields, params = GOOD | ({field: value} if inside else {}), FINE | ({} if inside else {field: value})
        request = accepted(engine, fields, params)
        engine.submit(NEIGHBOUR)
        done = drain(engine)
        assert done["neighbour"].finish_reason == "length", f"{field}={value!r}"
        if request is not None:
            assert done[request.id].finish_reason in ("length", "stop"), f"{field}={value!r}"


@settings(max_examples=60)
@given(st.data())
def test_no_step_raises_whatever_was_sent(engine: Engine, data: st.DataObject) -> None:
    for number in range(3):
        changes = data.draw(st.dictionaries(st.sampled_from([*GOOD, *FINE]), st.sampled_from(STRANGE), max_size=3))
        fields = GOOD | {"id": f"r{number}"} | {name: value for name, value in changes.items() if name in GOOD}
        accepted(engine, fields, FINE | {name: value for name, value in changes.items() if name in FINE})
    engine.submit(NEIGHBOUR)
    assert drain(engine)["neighbour"].finish_reason == "length"


@pytest.mark.parametrize(
    "params",
    [{"top_p": 1e-50}, {"top_k": 2**31}, {"top_k": 2**200}, {"temperature": 1e-46}, {"temperature": 1e-30},
     {"temperature": 3.4e38}],
    ids=str,
)  # fmt: skip
def test_any_allowed_sampling_parameters_give_the_tokens_of_the_oracle(engine: Engine, params: dict[str, Any]) -> None:
    """Numbers are read as float32, one token always stays, and all tokens may stay."""
    chosen = SamplingParams(max_tokens=6, ignore_eos=True, **params)
    engine.submit(Request(id="a", prompt_token_ids=(1, 2, 3), params=chosen, seed=7))
    done = drain(engine)["a"]
    read = {"top_p": max(float(np.float32(chosen.top_p)), 1e-40), "temperature": float(np.float32(chosen.temperature))}
    like = SamplingParams(max_tokens=6, ignore_eos=True, **{**params, **read})
    assert list(done.token_ids) == oracle.decode(copy.deepcopy(model()), [1, 2, 3], like, 7).token_ids


def test_prompts_are_never_truncated(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt_token_ids: must be a tuple of whole numbers"):
        engine.generate([[1, 2.5]])  # type: ignore[list-item]
    assert not engine.has_work
