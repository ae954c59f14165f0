"""Hostile moves are refused by name before anything is owned or written."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hostile_states import exported, target_of_fuzzing
from hypothesis import given, settings, strategies as st
from moving import PROMPT, VOCAB, alone, bits, drain, make, model, request

from rlhfspec.engine import Engine
from rlhfspec.engine.base import SequenceState
from rlhfspec.engine.kv.state_bytes import checksum_of, from_bytes, to_bytes
from rlhfspec.errors import InvalidRequest, MalformedRecord, SequenceStateError, WeightsVersionError
from rlhfspec.tiny import perturbed, random_model
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer


def test_a_sequence_that_can_never_run_there_is_refused_before_the_move() -> None:
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


def with_kv(state: SequenceState, change: Callable[[Any], Any]) -> SequenceState:
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


def with_request(**changes: Any) -> Callable[[Any], Any]:
    return lambda m: replace(m, request=replace(m.request, **changes))


def with_params(**changes: Any) -> Callable[[Any], Any]:
    return lambda m: replace(m, request=replace(m.request, params=replace(m.request.params, **changes)))


def setting(**changes: Any) -> Callable[[Any], Any]:
    return lambda record: replace(record, **changes)


HUGE = 1 << 2000
MANIFESTS: list[tuple[str, Callable[[Any], Any]]] = [
    ("manifest", lambda m: None),
    ("manifest", lambda m: {"schema": 2}),
    *(("schema", setting(schema=value)) for value in (1, 2, 4, "3", None, 3.0, np.zeros(2))),
    *(("fingerprints", setting(fingerprints=value)) for value in ((), ("a",) * 3, ["a"], (b"a",), None)),
    ("fingerprint", setting(fingerprints=("another model's",))),
    *(("architecture", setting(architecture=value)) for value in ("another", None, np.zeros(2))),
    *(("weights_version", setting(weights_version=value)) for value in (1, -1, "0", None, True, HUGE)),
    *(("epoch", setting(epoch=value)) for value in (-1, None, 0.5, "1")),
    *(("num_tokens", setting(num_tokens=value)) for value in (0, 39, 70, -1, HUGE, "48", None)),
    ("request", setting(request=None)),
    ("request", setting(request={"id": "x"})),
    *(("id", with_request(id=value)) for value in ("", 5, None)),
    *(
        ("prompt_token_ids", with_request(prompt_token_ids=value))
        for value in ((), (1.5,), [1, 2], None, (*PROMPT[1:], VOCAB), (*PROMPT[1:], -1), (*PROMPT[1:], HUGE), ("1",))
    ),
    ("num_tokens", with_request(prompt_token_ids=(1,) * 1000)),
    ("params", with_request(params=None)),
    *(("seed", with_request(seed=value)) for value in (-1, 1 << 64, "7", None)),
    ("group", with_request(group=7)),
    *(("history", with_request(history=value)) for value in (None, [(1,)], ((0.5,),))),
    ("weights_version", with_request(weights_version="0")),
    ("max_tokens", with_params(max_tokens=1000)),
    ("max_tokens", with_params(max_tokens=HUGE)),
    ("stop_token_ids", with_params(stop_token_ids=(VOCAB,))),
    ("stop", with_params(stop=("no tokenizer here",))),
]
RANGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("kv", lambda r: None),
    ("request_id", setting(request_id=None)),
    ("request_id", setting(request_id=np.zeros(3))),
    ("reservation", setting(request_id="y")),
    *(("start", setting(start=value)) for value in (None, (0, 0))),
    ("epoch", lambda r: replace(r, start=replace(r.start, epoch=r.start.epoch - 1))),
    ("epoch", lambda r: replace(r, start=replace(r.start, epoch=None))),
    *(
        ("start", lambda r, value=value: replace(r, start=replace(r.start, positions=value)))
        for value in ((1, 0), (0, 1), (0,), (0, 0, 0), (-1, 0), (0.0, 0), [0, 0], None)
    ),
    ("kv", lambda r: replace(r, start=replace(r.start, positions=(HUGE, 0)))),
    *(("kv", setting(kv=value)) for value in (None, (), (None, None), (b"", b""))),
    ("kv", lambda r: replace(r, kv=list(r.kv))),
    ("kv", lambda r: replace(r, kv=r.kv[:1])),
    ("kv", lambda r: replace(r, kv=(*r.kv, r.kv[0]))),
    ("kv", lambda r: replace(r, kv=(r.kv[0].view(np.int8), r.kv[1]))),
    ("kv", lambda r: replace(r, kv=(r.kv[0].ravel(), r.kv[1]))),
    ("kv", lambda r: replace(r, kv=(r.kv[0][None], r.kv[1]))),
    ("kv", lambda r: replace(r, kv=(r.kv[0][:, :-1].copy(), r.kv[1]))),
    ("kv", lambda r: replace(r, kv=(r.kv[0][:, ::-1], r.kv[1]))),
    ("kv", lambda r: replace(r, kv=(longer(r.kv[0]), r.kv[1]))),
    ("kv", lambda r: replace(r, kv=(np.broadcast_to(r.kv[0][:1], (1 << 40, r.kv[0].shape[1])), r.kv[1]))),
    *(("checksum", setting(checksum=value)) for value in (0, None, HUGE, "0", np.zeros(2))),
    *(("checksum", lambda r, at=at: replace(r, kv=(damaged_at(r.kv[0], at), r.kv[1]))) for at in (0, 5000, -1)),
    ("checksum", lambda r: replace(r, kv=(r.kv[0], damaged_at(r.kv[1], 0)))),
    ("checksum", lambda r: replace(r, kv=(r.kv[0][::-1].copy(), r.kv[1]))),
    ("checksum", lambda r: replace(r, kv=(r.kv[0][:-1], r.kv[1]))),
]
STATES: list[tuple[str, Callable[[Any], Any]]] = [
    ("state", lambda s: None),
    ("kv", setting(rest=5)),
    ("request_id", lambda s: replace(s, rest=replace(s.rest, request_id="y"))),
    ("checksum", lambda s: replace(s, rest=replace(s.rest, checksum=s.rest.checksum ^ 1))),
    ("kv", lambda s: with_kv(s, lambda kv: longer(kv)[: len(s.token_ids)])),  # of every position: none is left to run
    ("kv", lambda s: with_kv(s, longer)),
    ("kv", lambda s: with_kv(s, lambda kv: kv[:, : kv.shape[1] // 2])),
    ("checksum", lambda s: with_kv(s, lambda kv: damaged_at(kv, -1))),
    ("kv", lambda s: with_kv(s, lambda kv: kv.view(np.float32))),
    ("kv", lambda s: replace(s, rest=replace(s.rest, kv=s.rest.kv[:1]))),
    ("epoch", lambda s: with_manifest(s, epoch=3)),
    ("num_tokens", lambda s: with_manifest(s, num_tokens=500)),
    ("token_ids", lambda s: with_manifest(s, num_tokens=s.manifest.num_tokens - 1)),
    *(("token_ids", lambda s, end=end: replace(s, token_ids=s.token_ids[:end])) for end in (0, -1)),
    *(("token_ids", lambda s, token=token: with_token(s, -1, token)) for token in (VOCAB, -1, 1 << 30)),
    ("token_ids", lambda s: with_token(s, 0, 5)),  # another prompt: its KV would be shared under the wrong name
    ("token_ids", lambda s: replace(s, token_ids=s.token_ids.astype(np.int64))),
    ("token_ids", lambda s: replace(s, token_ids=s.token_ids[None])),
    *(("token_ids", setting(token_ids=value)) for value in (None, (1, 2))),
    *(
        (name, lambda s, name=name, change=change: replace(s, **{name: change(getattr(s, name))}))
        for name in ("log_probs", "tempered_log_probs")
        for change in (
            lambda values: values[:-1], lambda values: None, lambda values: values.astype(np.float64),
            lambda values: values * np.float32("nan"), lambda values: values * np.float32("inf"),
        )
    ),
    ("weights_versions", lambda s: replace(s, weights_versions=s.weights_versions[:0])),
    ("weights_versions", lambda s: replace(s, weights_versions=s.weights_versions + 9)),
    ("weights_versions", lambda s: replace(s, weights_versions=s.weights_versions - 1)),
    *(
        ("counters", setting(counters=value))
        for value in ((1, 2), None, (-1, 0, 0, 0, 0), (HUGE, 0, 0, 0, 0), (0.5, 0, 0, 0, 0), (True, 0, 0, 0, 0))
    ),
    *(
        ("strategies", setting(strategies=value))
        for value in (((3, "plain"),), None, (("plain",),), (("plain", -1),), (("plain", 1),) * 2000)
    ),
    *(
        ("acceptance", setting(acceptance=value))
        for value in ((("model", float("nan"), 1.0),), None, (("model", 1.0),), ((1, 1.0, 1.0),),
                      (("model", 1.0, 0.0),), (("model", HUGE, 1.0),), (("model", 1.0, 1.0),) * 2000)
    ),
    *(("history", setting(history=value)) for value in (None, ((VOCAB,),), [[1]])),
    *(("age_seconds", setting(age_seconds=value)) for value in (-1.0, float("nan"), float("inf"), HUGE, "1", True)),
    *((field, lambda s, change=change: replace(s, manifest=change(s.manifest))) for field, change in MANIFESTS),
]  # fmt: skip
REFUSALS = (SequenceStateError, InvalidRequest)


def refused(call: Callable[[], object], field: str, there: Engine) -> None:
    before = (there.stats(), there.sequences(), sorted(there.scheduler.arriving), dict(there.scheduler.promised))
    cached = [space.cached.tolist() for space in there.state.spaces]
    content = [space.runner.kv.clone() for space in there.state.spaces]
    with pytest.raises(REFUSALS) as caught:
        call()
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000
    there.check_integrity()
    assert before == (there.stats(), there.sequences(), sorted(there.scheduler.arriving), there.scheduler.promised)
    assert cached == [space.cached.tolist() for space in there.state.spaces]
    assert all(torch.equal(old, space.runner.kv) for old, space in zip(content, there.state.spaces, strict=True))


def test_a_hostile_manifest_is_refused_before_anything_is_sent() -> None:
    here, there = make(), make()
    here.submit(request("x"))
    here.step()
    for field, change in MANIFESTS:
        refused(lambda change=change: there.reserve(change(here.manifest("x"))), field, there)
    assert bits(drain(here)["x"]) == alone()


def test_a_hostile_range_is_refused_before_it_is_written() -> None:
    here, there = make(), make()
    here.submit(request("x"))
    for _ in range(3):
        here.step()
    kv = here.export_range("x", there.reserve(here.manifest("x")))
    for field, change in RANGES:
        refused(lambda change=change: there.import_range(change(kv)), field, there)
    there.import_range(kv)  # the right one may still come
    state = here.export_sequence("x", kv.end)
    here.reattach("x")
    there.import_sequence(state)
    assert bits(drain(there)["x"]) == bits(drain(here)["x"]) == alone()


@pytest.mark.parametrize("is_reserved", [False, True])
def test_a_hostile_sequence_is_refused_before_it_is_owned(is_reserved: bool) -> None:
    good, there = exported(), make()
    if is_reserved:
        there.reserve(good.manifest)
    for field, change in STATES:
        if field == "fingerprint":
            continue  # tokens are welcome
        refused(lambda change=change: there.import_sequence(change(good)), field, there)
    there.import_sequence(good)  # the right one may still come
    assert bits(drain(there)["x"]) == alone()
    assert len(MANIFESTS) + len(RANGES) + len(STATES) >= 80


def test_a_state_with_decreasing_weights_versions_is_refused() -> None:
    here, there = make(), make()
    here.submit(request("x"))
    for _ in range(4):
        here.step()
    for engine in (here, there):
        engine.load_weights(perturbed(model(), 0.1).state_dict(), version=1)
    here.step()
    here.step()
    state = here.export_sequence("x")
    assert set(state.weights_versions.tolist()) == {0, 1}
    refused(lambda: there.import_sequence(replace(state, weights_versions=state.weights_versions[::-1].copy())),
            "weights_versions", there)  # fmt: skip


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


def sealed(header: bytes, rest: bytes) -> bytes:
    body = b"RLHFMOVE" + len(header).to_bytes(4, "little") + header + rest
    return body + checksum_of([body]).to_bytes(8, "little")


def headed(**header: Any) -> bytes:
    return sealed(json.dumps(header).encode(), b"")


MARK = {"record": "Watermark", "epoch": 1, "positions": [0]}
NO_RECORDS: dict[str, bytes] = {
    "nothing": b"",
    "less than a checksum": b"RLHF",
    "a checksum of nothing": checksum_of([b""]).to_bytes(8, "little"),
    "another beginning": sealed(b"{}", b"").replace(b"RLHFMOVE", b"RLHFMOVF"),
    "no header": sealed(b"", b""),
    "no JSON": sealed(b"\x80abc", b""),
    "nested without end": sealed(b"[" * 100_000, b""),
    "a number without end": sealed(b'{"content": ' + b"9" * 5000 + b', "arrays": []}', b""),
    "a longer header than bytes": (body := b"RLHFMOVE\xff\xff\xff\x7f{}") + checksum_of([body]).to_bytes(8, "little"),
    "no content": headed(arrays=[]),
    "no arrays": headed(content=MARK),
    "a record of nobody": headed(content={"record": "Engine"}, arrays=[]),
    "a record that does not travel": headed(content={"record": "SamplingParams"}, arrays=[]),
    "a list": headed(content=[MARK], arrays=[]),
    "a field too many": headed(content=MARK | {"more": 1}, arrays=[]),
    "a field too few": headed(content={"record": "Watermark", "epoch": 1}, arrays=[]),
    "a record by number": headed(content=MARK | {"record": 3}, arrays=[]),
    "an array of objects": headed(content=MARK, arrays=[["object", [1]]]),
    "an array of complex numbers": headed(content=MARK, arrays=[["complex128", [0]]]),
    "an array that is not there": headed(content=MARK, arrays=[["uint8", [5]]]),
    "an array of negative length": headed(content=MARK, arrays=[["uint8", [-1]]]),
    "two lengths below zero": headed(content=MARK, arrays=[["uint8", [-1, -1]]]),
    "a huge array": headed(content=MARK, arrays=[["uint8", [1 << 62]]]),
    "an array past all numbers": headed(content=MARK, arrays=[["uint8", [1 << 80]]]),
    "an infinite array": sealed(b'{"content": {}, "arrays": [["uint8", [1e999]]]}', b""),
    "a shape that is no list": headed(content=MARK, arrays=[["uint8", 3]]),
    "an index past the arrays": headed(content=MARK | {"positions": {"array": 0}}, arrays=[]),
    "bytes too many": sealed(json.dumps({"content": MARK, "arrays": []}).encode(), b"more"),
}


@pytest.mark.parametrize("name", NO_RECORDS)
def test_bytes_that_are_no_record_are_refused(name: str) -> None:
    with pytest.raises(MalformedRecord):
        from_bytes(NO_RECORDS[name])


LIES = [None, True, 0, 1, -1, 40, 47, 48, 1 << 40, 0.5, float("nan"), "", "x", [], [1], [[1, 2]], {}, {"array": 0}]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, each in inner for found in paths_of(each, (*path, key)))]


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_a_header_that_lies_is_refused_by_name_or_harmless(data: st.DataObject) -> None:
    """The checksum is right, so only the content can reveal the lie. Nothing spins or leaks."""
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
        assert len(done.token_ids) == len(done.log_probs) <= (128 - len(done.prompt_token_ids))
    for name in list(there.scheduler.arriving):
        assert there.cancel(name)
    assert there.stats().num_free_blocks == there.stats().num_blocks


def test_a_reservation_is_for_one_request_and_its_announced_length() -> None:
    here, there = make(), make()
    here.submit(request("x", max_tokens=60))
    here.submit(request("y", PROMPT[::-1], max_tokens=60))
    for _ in range(10):
        here.step()
    x, y = (here.export_sequence(name) for name in "xy")
    there.reserve(x.manifest)
    renamed = replace(y.manifest, request=replace(y.manifest.request, id="x"))
    with pytest.raises(SequenceStateError, match="request"):
        there.import_sequence(replace(y, manifest=renamed, rest=replace(y.rest, request_id="x")))
    there.import_range(x.rest)
    shorter = exported(42)  # the same sequence, some steps before
    with pytest.raises(SequenceStateError, match=r"kv|request"):
        there.import_sequence(with_manifest(shorter, request=x.manifest.request))
    there.check_integrity()
    there.import_sequence(x)
    assert bits(drain(there)["x"]) == alone(max_tokens=60)
