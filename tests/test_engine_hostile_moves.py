"""What another process sends and should not: refused by name, before anything is owned or written."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from moving import PROMPT, VOCAB, alone, bits, drain, make, model, request

from rlhfspec.engine import Completion, Engine
from rlhfspec.engine.base import SequenceState
from rlhfspec.engine.state_bytes import checksum_of, from_bytes, to_bytes
from rlhfspec.errors import InvalidRequest, MalformedRecord, SequenceStateError, WeightsVersionError
from rlhfspec.tiny import perturbed, random_model
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer


def test_what_can_never_run_there_is_refused_before_anything_is_sent() -> None:
    here = make(tokenizer=hugging_face_tokenizer())
    here.submit(request("stops", stop=("zzz",)))
    here.submit(request("long", max_tokens=80))
    here.submit(replace(request("pinned"), weights_version=0))
    here.step()
    with pytest.raises(InvalidRequest, match=r"^stop: .* need a tokenizer"):
        make().reserve(here.manifest("stops"))
    with pytest.raises(InvalidRequest, match="max_tokens"):
        make(max_context=100).reserve(here.manifest("long"))
    newer = make()
    newer.load_weights(model().state_dict(), version=1)
    with pytest.raises(SequenceStateError, match="weights_version"):
        newer.reserve(here.manifest("long"))
    with pytest.raises(WeightsVersionError):
        newer.import_sequence(here.export_sequence("pinned"))
    with pytest.raises(SequenceStateError, match="architecture"):
        make(model=random_model("qwen2", seed=1, vocab_size=VOCAB)).reserve(here.manifest("long"))
    with pytest.raises(SequenceStateError, match="fingerprint"):
        make(model=perturbed(model(), 1e-3)).reserve(here.manifest("long"))
    with pytest.raises(InvalidRequest, match="already in the engine"):
        here.reserve(here.manifest("long"))


@functools.cache
def exported(num_tokens: int = 48) -> SequenceState:
    here = make()
    here.submit(request("x"))
    while here.state.rows.lengths.max() < num_tokens:
        here.step()
    return here.export_sequence("x")


def with_kv(state: SequenceState, change: Callable[[Any], Any]) -> SequenceState:
    assert state.rest is not None
    return replace(state, rest=replace(state.rest, kv=(change(state.rest.kv[0]), state.rest.kv[1])))


def with_token(state: SequenceState, index: int, token: int) -> SequenceState:
    tokens = state.token_ids.copy()
    tokens[index] = token
    return replace(state, token_ids=tokens)


def longer(part: Any) -> Any:
    return np.concatenate((part, part, part))


def damaged_at(part: Any, place: int) -> Any:
    part = part.copy()
    part.reshape(-1)[place] ^= 1
    return part


def with_manifest(state: SequenceState, **changes: Any) -> SequenceState:
    return replace(state, manifest=replace(state.manifest, **changes))


CHANGES: dict[str, tuple[str, Callable[[Any], SequenceState]]] = {
    "KV of every position": ("kv", lambda s: with_kv(s, lambda kv: longer(kv)[: len(s.token_ids)])),
    "KV of more positions than tokens": ("kv", lambda s: with_kv(s, longer)),
    "a layer is missing": ("kv", lambda s: with_kv(s, lambda kv: kv[:, : kv.shape[1] // 2])),
    "a bit of the KV": ("checksum", lambda s: with_kv(s, lambda kv: damaged_at(kv, -1))),
    "KV of another type": ("kv", lambda s: with_kv(s, lambda kv: kv.view(np.float32))),
    "one space only": ("kv", lambda s: replace(s, rest=replace(s.rest, kv=s.rest.kv[:1]))),
    "another epoch": ("epoch", lambda s: with_manifest(s, epoch=3)),
    "no tokens": ("token_ids", lambda s: replace(s, token_ids=s.token_ids[:0])),
    "fewer tokens than said": ("token_ids", lambda s: replace(s, token_ids=s.token_ids[:-1])),
    "a token outside": ("token_ids", lambda s: with_token(s, -1, VOCAB)),
    "a negative token": ("token_ids", lambda s: with_token(s, -1, -1)),
    "another prompt": ("token_ids", lambda s: with_token(s, 0, 5)),
    "tokens of 64 bits": ("token_ids", lambda s: replace(s, token_ids=s.token_ids.astype(np.int64))),
    "longer than it may be": ("num_tokens", lambda s: with_manifest(s, num_tokens=500)),
    "log-probs of another length": ("log_probs", lambda s: replace(s, log_probs=s.log_probs[:-1])),
    "no versions": ("weights_versions", lambda s: replace(s, weights_versions=s.weights_versions[:0])),
    "a version of the future": ("weights_versions", lambda s: replace(s, weights_versions=s.weights_versions + 9)),
    "counters": ("counters", lambda s: replace(s, counters=(1, 2))),
    "strategies": ("strategies", lambda s: replace(s, strategies=((3, "plain"),))),
    "acceptance": ("acceptance", lambda s: replace(s, acceptance=(("model", float("nan"), 1.0),))),
    "age": ("age_seconds", lambda s: replace(s, age_seconds=-1.0)),
    "schema": ("schema", lambda s: with_manifest(s, schema=1)),
    "no manifest": ("manifest", lambda s: replace(s, manifest=None)),
}


@pytest.mark.parametrize("is_reserved", [False, True])
def test_a_malformed_sequence_is_refused_and_changes_nothing(is_reserved: bool) -> None:
    good, there = exported(), make()
    if is_reserved:
        there.reserve(good.manifest)
    free = there.stats().num_free_blocks
    for name, (field, change) in CHANGES.items():
        with pytest.raises(SequenceStateError) as caught:
            there.import_sequence(change(good))
        assert caught.value.field == field, name
        there.check_integrity()
        assert there.stats().num_free_blocks == free
        assert not there.has_work
    there.import_sequence(good)  # the right one may still come
    assert bits(drain(there)["x"]) == alone()


def test_a_range_that_does_not_fit_is_refused_and_the_right_one_may_follow() -> None:
    here, there = make(), make()
    here.submit(request("x"))
    here.step()
    mark = there.reserve(here.manifest("x"))
    kv = here.export_range("x", mark)
    wrong: dict[str, Any] = {
        "start": replace(kv, start=replace(kv.start, positions=(1, 0))),
        "kv": replace(kv, kv=(longer(kv.kv[0]), kv.kv[1])),
        "reservation": replace(kv, request_id="y"),
        "request_id": replace(kv, request_id=kv.kv[0]),
        "checksum": replace(kv, kv=(damaged_at(kv.kv[0], 0), kv.kv[1])),
    }
    for field, each in wrong.items():
        with pytest.raises(SequenceStateError) as caught:
            there.import_range(each)
        assert caught.value.field == field
        there.check_integrity()
    there.import_range(kv)
    there.import_sequence(here.export_sequence("x", kv.end))
    assert bits(drain(there)["x"]) == alone()
    assert there.cancel("x") is False


# ---- as bytes -------------------------------------------------------------------------------------------------------


@functools.cache
def target_of_fuzzing() -> Engine:
    return make()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damaged_bytes_are_refused_by_name(data: st.DataObject) -> None:
    good = bytearray(to_bytes(exported()))
    if data.draw(st.booleans()):
        damaged = good[: data.draw(st.integers(0, len(good) - 1))]
    else:
        place, change = data.draw(st.integers(0, len(good) - 1)), data.draw(st.integers(1, 255))
        damaged = good.copy()
        damaged[place] ^= change
    with pytest.raises(MalformedRecord):
        from_bytes(damaged)


LIES = [None, True, 0, 1, -1, 40, 47, 48, 1 << 40, 0.5, float("nan"), "", "x", [], [1], [[1, 2]], {}, {"array": 0}]


def sealed(header: bytes, rest: bytes) -> bytes:
    """As `to_bytes` would write it, whatever the header says."""
    body = b"RLHFMOVE" + len(header).to_bytes(4, "little") + header + rest
    return body + checksum_of([body]).to_bytes(8, "little")


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in paths_of(each, (*path, key)))]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_header_that_lies_is_refused_by_name_or_harmless(data: st.DataObject) -> None:
    """Its checksum is right: what is wrong was written so. Nothing spins and nothing leaks."""
    good, there = to_bytes(exported()), target_of_fuzzing()
    length = int.from_bytes(good[8:12], "little")
    header, rest = json.loads(good[12 : 12 + length]), good[12 + length : -8]
    paths = [path for path in paths_of(header) if path and "prompt_token_ids" not in path[:-1]]
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3)):
        place = header
        try:
            for key in path[:-1]:
                place = place[key]
            place[path[-1]] = data.draw(st.sampled_from(LIES))
        except (TypeError, KeyError, IndexError):
            continue  # an earlier lie took its place
    is_reserved = data.draw(st.booleans())
    if is_reserved:
        there.reserve(exported().manifest)
    try:
        there.import_sequence(from_bytes(sealed(json.dumps(header).encode(), rest)))
    except (MalformedRecord, SequenceStateError, InvalidRequest, WeightsVersionError):
        assert not there.has_work
        assert there.cancel("x") == is_reserved
    for done in drain(there).values():
        assert len(done.token_ids) == len(done.log_probs) <= done_limit(done)
    for name in list(there.scheduler.arriving):
        assert there.cancel(name)
    assert there.stats().num_free_blocks == there.stats().num_blocks


def test_a_reservation_is_for_one_request_and_never_longer_than_what_comes() -> None:
    here, there = make(), make()
    here.submit(request("x", max_tokens=60))
    here.submit(request("y", PROMPT[::-1], max_tokens=60))
    for _ in range(10):
        here.step()
    x, y = (here.export_sequence(name) for name in "xy")
    there.reserve(x.manifest)
    renamed = replace(y.manifest, request=replace(y.manifest.request, id="x"))
    assert y.rest is not None
    with pytest.raises(SequenceStateError, match="request"):
        there.import_sequence(replace(y, manifest=renamed, rest=replace(y.rest, request_id="x")))
    assert x.rest is not None
    there.import_range(x.rest)
    shorter = exported(42)  # the same sequence, some steps before
    with pytest.raises(SequenceStateError, match=r"kv|request"):
        there.import_sequence(with_manifest(shorter, request=x.manifest.request))
    there.check_integrity()
    there.import_sequence(x)
    assert bits(drain(there)["x"]) == alone(max_tokens=60)


def done_limit(done: Completion) -> int:
    return 128 - len(done.prompt_token_ids)
