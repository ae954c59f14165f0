"""Sequences that move between engines: the same tokens and log-probs, whenever and however they go, or a refusal."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhfspec.drafting.base import Plan
from rlhfspec.engine import Completion, Engine, Request, SamplingParams
from rlhfspec.engine.base import KVRange, SequenceState, Watermark
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.loading import make_engine
from rlhfspec.engine.state_bytes import checksum_of, from_bytes, to_bytes
from rlhfspec.errors import InvalidRequest, MalformedRecord, SequenceStateError, WeightsVersionError
from rlhfspec.tiny import perturbed, random_model
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer

VOCAB = 260  # the byte tokenizer's
TREE = Plan(drafter="model", depth=4, width=2, branch=2)
SUFFIX = Plan(drafter="suffix", depth=4, width=2, branch=2)
PROMPT = tuple(range(40))
Bits = tuple[tuple[int, ...], tuple[float, ...], tuple[float, ...], str]


@functools.cache
def model(kind: str = "llama") -> Any:
    return random_model(kind, seed=1, vocab_size=VOCAB)


@functools.cache
def draft() -> Any:
    return perturbed(model(), 0.1)


def make(**options: Any) -> Engine:
    chosen = {"max_sequences": 8, "max_context": 128, "profile": False, "num_threads": 1, "speculation": TREE} | options
    extra = {"tokenizer": chosen.pop("tokenizer", None), "draft": chosen.pop("draft", draft())}
    given = chosen.pop("model", model())
    extra["draft"] = copy.deepcopy(extra["draft"])
    return make_engine(copy.deepcopy(given), EngineConfig(**chosen), **extra)


def request(name: str, prompt: tuple[int, ...] = PROMPT, *, seed: int = 7, **params: Any) -> Request:
    params = {"max_tokens": 30, "ignore_eos": True} | params
    return Request(id=name, prompt_token_ids=prompt, params=SamplingParams(**params), seed=seed)


def bits(done: Completion) -> Bits:
    return done.token_ids, done.log_probs, done.tempered_log_probs, done.finish_reason


def drain(engine: Engine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    for _ in range(500):  # an engine that spins is a failure, not a hang
        if not engine.has_work:
            engine.check_integrity()
            return done
        done.update({each.id: each for each in engine.step().finished})
    raise AssertionError("work was left and nothing came of it")


@functools.cache
def alone(seed: int = 7, max_tokens: int = 30) -> Bits:
    engine = make(speculation="off")
    engine.submit(request("x", seed=seed, max_tokens=max_tokens))
    return bits(drain(engine)["x"])


def check(*engines: Engine) -> None:
    for engine in engines:
        engine.check_integrity()


def at_once(here: Engine, there: Engine, name: str, rng: np.random.Generator) -> None:
    there.import_sequence(here.export_sequence(name))
    assert here.cancel(name)


def reserved(here: Engine, there: Engine, name: str, rng: np.random.Generator) -> None:
    mark = there.reserve(here.manifest(name))
    there.import_sequence(here.export_sequence(name, mark))
    assert here.cancel(name)


def in_rounds(here: Engine, there: Engine, name: str, rng: np.random.Generator) -> list[Completion]:
    """KV goes ahead while both decode on."""
    mark, done = there.reserve(here.manifest(name)), []
    for _ in range(int(rng.integers(1, 4))):
        for _ in range(int(rng.integers(1, 5))):
            kv = here.export_range(name, mark, max_bytes=int(rng.choice([1, 3000, 40_000])))
            there.import_range(kv)
            mark = kv.end
        for engine in (here, there):
            done += engine.step().finished if engine.has_work else ()
        check(here, there)
        if name not in here.state.sequences:  # finished meanwhile
            there.cancel(name)
            return done
    there.import_sequence(here.export_sequence(name, mark))
    assert here.cancel(name)
    return done


# ---- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [at_once, reserved, in_rounds])
@pytest.mark.parametrize("speculation", ["off", "adaptive", TREE, SUFFIX])
def test_moved_at_any_time_in_any_way_the_bits_are_those_of_the_plain_engine(
    way: Callable[..., list[Completion] | None], speculation: str | Plan
) -> None:
    rng = np.random.default_rng(3)
    engines = [make(speculation=speculation, prefill_chunk=24), make(speculation=speculation)]
    wanted = {str(seed): alone(seed) for seed in range(3)}
    for seed in range(3):
        engines[seed % 2].submit(request(str(seed), seed=seed))
    done: dict[str, Completion] = {}
    moves = 0
    while any(engine.has_work for engine in engines):
        for engine in engines:
            done.update({each.id: each for each in (engine.step().finished if engine.has_work else ())})
        places = [(name, index) for index in (0, 1) for name in engines[index].state.sequences]
        if places:
            name, index = places[int(rng.integers(len(places)))]
            finished = way(engines[index], engines[1 - index], name, rng)
            done.update({each.id: each for each in finished or ()})
            moves += 1
        check(*engines)
    assert {name: bits(each) for name, each in done.items()} == wanted
    assert moves > 4
    assert sum(each.stats.num_moves for each in done.values()) > moves // 2
    assert sum(each.stats.num_preemptions for each in done.values()) == 0, "KV went along: nothing was computed again"
    for engine in engines:
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_bf16_moves_bit_for_bit_too() -> None:
    engines = [make(dtype="bfloat16", speculation=each) for each in ("off", TREE, TREE)]
    for engine in engines[:2]:
        engine.submit(request("x", max_tokens=60))
        engine.step()
    done: list[Completion] = []
    rng, here, there = np.random.default_rng(5), engines[1], engines[2]
    while here.has_work:
        done += in_rounds(here, there, "x", rng)
        here, there = there, here
        done += here.step().finished if here.has_work else ()
    assert bits(done[0]) == bits(drain(engines[0])["x"])
    assert done[0].stats.num_moves > 2


def test_the_kv_comes_along_and_nothing_is_computed_again() -> None:
    here, there = make(), make()
    here.submit(request("x"))
    for _ in range(4):
        here.step()
    length = int(here.state.rows.lengths.max())
    at_once(here, there, "x", np.random.default_rng(0))
    report = there.step()
    assert (report.num_prefill_tokens, report.num_decoding) == (0, 1)
    assert [int(space.cached.max()) >= length for space in there.state.spaces] == [True, True]
    assert bits(drain(there)["x"]) == alone()


def test_a_whole_prompt_that_is_here_is_not_sent_again() -> None:
    """Siblings share its blocks after they came, as those do that compute it; one that comes late shares them too."""
    here, there = make(), make()
    for index in range(4):
        here.submit(request(str(index), seed=index))
    for _ in range(6):
        here.step()
    used = here.stats().num_blocks - here.stats().num_free_blocks
    sent = []
    for index in range(4):
        mark = there.reserve(here.manifest(str(index)))
        kv = here.export_range(str(index), mark)
        sent.append(kv.start.positions)
        there.import_range(kv)
        there.import_sequence(here.export_sequence(str(index), kv.end))
        here.cancel(str(index))
        check(here, there)
    assert sent == [(0, 0), (32, 32), (32, 32), (32, 32)], "two whole blocks of the prompt"
    assert there.stats().num_blocks - there.stats().num_free_blocks <= used
    there.submit(request("late", seed=9))
    assert there.step().num_prefill_tokens == len(PROMPT) - 32
    late = there.state.sequences["late"].row
    assert int(there.state.spaces[1].cached[late]) >= 32, "nor does the draft run the prefix again"
    assert drain(there).keys() == {"0", "1", "2", "3", "late"}


def test_what_was_learnt_of_a_sequence_goes_with_it() -> None:
    here, there = make(), make()
    here.submit(request("x", max_tokens=60))
    while here.state.rows.lengths.max() < 60:
        here.step()
    row = here.state.sequences["x"].row
    here.speculation.acceptance.take_over(row, [("model", 0.75, 5.0)])
    at_once(here, there, "x", np.random.default_rng(0))
    learnt = there.speculation.acceptance.learnt(there.state.sequences["x"].row)
    assert ("model", 0.75, 5.0) in learnt


def test_it_is_as_old_as_it_was() -> None:
    """Neither the youngest of those that run, nor behind the queue when there is no room."""
    old, young = make(), make(max_sequences=2)
    old.submit(request("old", seed=1))
    old.step()
    for name in ("a", "b", "waits"):
        young.submit(request(name, PROMPT[::-1], seed=2))
    young.step()
    young.step()  # the second waited for the prompt of the first
    with pytest.raises(SequenceStateError, match="room"):
        young.reserve(old.manifest("old"))
    at_once(old, young, "old", np.random.default_rng(0))
    assert [sequence.request.id for sequence in young.scheduler.waiting] == ["old", "waits"]
    other = make()
    other.submit(request("c", seed=3))
    other.step()
    at_once(young, other, "old", np.random.default_rng(0))
    assert [sequence.request.id for sequence in [*other.scheduler.waiting, *other.scheduler.running]] == ["old", "c"]
    assert bits(drain(other)["old"]) == alone(1)
    drain(young)


# ---- when it does not come to it ------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_an_exported_sequence_is_ours_until_it_is_cancelled(steps: int) -> None:
    here = make(prefill_chunk=24)
    here.submit(request("x"))
    for _ in range(steps):
        here.step()
    here.export_sequence("x")
    assert not here.has_work
    with pytest.raises(InvalidRequest, match="already in the engine"):
        here.submit(request("x"))
    here.check_integrity()
    here.reattach("x")
    done = drain(here)["x"]
    assert bits(done) == alone()
    assert done.stats.num_preemptions == 0
    for call in (here.reattach, here.export_sequence, here.manifest):
        with pytest.raises(InvalidRequest, match="request_id"):
            call("x")


def test_new_weights_at_either_end_leave_somebody_who_goes_on() -> None:
    weights = perturbed(model(), 0.3).state_dict()
    here, there = make(), make()
    here.submit(request("x"))
    for _ in range(4):
        here.step()
    mark = there.reserve(here.manifest("x"))
    there.import_range(here.export_range("x", mark))
    state = here.export_sequence("x")
    for engine in (here, there):
        engine.load_weights(weights, version=3)
        check(here, there)
    here.reattach("x")  # the source takes it back ...
    there.import_sequence(state)  # ... and, were it lost, so would the destination: every token says its version
    ours, theirs = drain(here)["x"], drain(there)["x"]
    assert bits(ours) == bits(theirs)
    assert set(theirs.weights_versions) == {0, 3}
    assert theirs.stats.num_preemptions == 1
    with pytest.raises(SequenceStateError, match="weights_version"):
        make().import_sequence(replace(state, manifest=replace(state.manifest, weights_version=3)))


def test_tokens_alone_are_enough() -> None:
    here, there = make(), make()
    here.submit(request("x"))
    for _ in range(4):
        here.step()
    there.import_sequence(replace(here.export_sequence("x"), rest=None))
    done = drain(there)["x"]
    assert bits(done) == alone()
    assert (done.stats.num_moves, done.stats.num_preemptions, there.stats().num_moves) == (1, 1, 1)


def test_a_preemption_voids_what_was_sent_and_the_sequence_goes_on() -> None:
    here, there = make(), make()
    here.submit(request("x"))
    here.step()
    mark = there.reserve(here.manifest("x"))
    kv = here.export_range("x", mark)
    there.import_range(kv)
    assert here.preempt("x")
    here.step()
    for call in (here.export_range, here.export_sequence):
        with pytest.raises(SequenceStateError, match="epoch"):
            call("x", kv.end)
    again = here.export_range("x", replace(mark, epoch=here.manifest("x").epoch))
    with pytest.raises(SequenceStateError, match="epoch"):
        there.import_range(again)
    there.import_sequence(here.export_sequence("x"))  # all of it
    here.cancel("x")
    assert bits(drain(there)["x"]) == alone()


def test_memory_that_is_kept_for_a_move_never_stops_the_others() -> None:
    tight = {"kv_cache_tokens": 160, "max_sequences": 3, "speculation": "off"}
    here, there = make(**tight), make(**tight)
    for engine, name in ((here, "x"), (there, "y")):
        engine.submit(request(name, max_tokens=60))
        engine.step()
    mark = there.reserve(here.manifest("x"))
    there.import_range(here.export_range("x", mark))
    state = here.export_sequence("x", mark)
    for engine in (here, there):
        for index in range(3):
            engine.submit(request(f"late-{index}", PROMPT[::-1], max_tokens=60, seed=index))
        assert len(drain(engine)) >= 3
    there.import_sequence(state)
    here.reattach("x")
    assert bits(drain(there)["x"]) == bits(drain(here)["x"]) == alone(max_tokens=60)


def test_a_range_holds_at_most_the_bytes_it_may() -> None:
    here = make()
    here.submit(request("x"))
    here.step()
    most = 5 * max(space.runner.bytes_per_position for space in here.state.spaces)
    everything = here.export_range("x", Watermark(epoch=here.manifest("x").epoch, positions=(0, 0)))
    mark, sizes = everything.start, []
    while (kv := here.export_range("x", mark, max_bytes=most)).num_positions:
        sizes.append(sum(part.nbytes for part in kv.kv))
        mark = kv.end
    assert max(sizes) <= most
    assert sum(sizes) == sum(part.nbytes for part in everything.kv)
    assert here.export_range("x", everything.start, max_bytes=1).num_positions == 1


def test_kv_is_packed_once_into_the_memory_of_a_link() -> None:
    """The parts are views of it, one behind the other; the other side reads them where they landed."""
    here, there = make(), make()
    here.submit(request("x"))
    here.step()
    here.step()
    mark = there.reserve(here.manifest("x"))
    expected = here.export_range("x", mark)
    num_bytes = sum(part.nbytes for part in expected.kv)
    memory = np.full(num_bytes + 9, 0xEE, np.uint8)
    kv = here.export_range("x", mark, out=memory[3:])  # wherever it begins
    assert [np.shares_memory(part, memory) for part in kv.kv] == [True, True]
    assert memory[3 : 3 + num_bytes].tobytes() == b"".join(part.tobytes() for part in expected.kv)
    assert memory[3 + num_bytes :].tolist() == [0xEE] * 6, "and nothing behind it"
    assert kv.checksum == expected.checksum
    header, received = to_bytes(kv, has_kv=False), memory[3 : 3 + num_bytes].tobytes()
    assert len(header) < 600
    landed = from_bytes(header, kv=received)
    assert isinstance(landed, KVRange)
    assert not landed.kv[0].flags.writeable
    there.import_range(landed)
    there.import_sequence(here.export_sequence("x", landed.end))
    assert bits(drain(there)["x"]) == alone()
    with pytest.raises(MalformedRecord):
        from_bytes(header, kv=received[:-1])


@pytest.mark.parametrize(
    "wrong", [np.empty(8, np.uint8), np.empty(1 << 20, np.int8), np.empty((1 << 10, 1 << 10), np.uint8)]
)
def test_memory_that_does_not_take_a_range_is_refused(wrong: Any) -> None:
    here = make()
    here.submit(request("x"))
    here.step()
    with pytest.raises(SequenceStateError, match="out"):
        here.export_range("x", Watermark(epoch=here.manifest("x").epoch, positions=(0, 0)), out=wrong)


def test_an_engine_tells_what_it_has() -> None:
    engine = make(max_sequences=2, prefill_chunk=24)
    for name in ("a", "b", "c"):
        engine.submit(request(name, PROMPT[::-1] if name == "b" else PROMPT))
    assert [(view.id, view.is_waiting, view.num_prefill) for view in engine.sequences()] == [
        ("a", True, 40), ("b", True, 40), ("c", True, 40),
    ]  # fmt: skip
    engine.step()
    a, b, c = engine.sequences()
    assert (a.is_waiting, a.num_prefill, b.num_prefill, c.is_waiting) == (False, 16, 40, True)
    for _ in range(5):
        engine.step()
    length = int(engine.state.rows.lengths[engine.state.sequences["a"].row])
    a = engine.sequences()[0]
    assert (a.num_held, a.num_generated, a.num_prefill) == (length, length - 40, 0)
    engine.preempt("a")
    assert {view.id: (view.num_held, view.num_prefill, view.is_waiting) for view in engine.sequences()}["a"] == (
        length, length, True,
    )  # fmt: skip
    engine.export_sequence("b")
    assert [view.id for view in engine.sequences()] == ["a", "c"]


# ---- what is refused ------------------------------------------------------------------------------------------------


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


def test_a_reservation_is_given_up_by_cancelling_it() -> None:
    here, there = make(), make()
    here.submit(request("x"))
    here.step()
    mark = there.reserve(here.manifest("x"))
    there.import_range(here.export_range("x", mark))
    assert there.stats().num_free_blocks < there.stats().num_blocks
    assert not there.has_work
    assert there.cancel("x")
    there.check_integrity()
    assert there.stats().num_free_blocks == there.stats().num_blocks


# ---- as bytes -------------------------------------------------------------------------------------------------------


def test_bytes_bring_everything_back_bit_for_bit() -> None:
    here, there = make(), make()
    here.submit(replace(request("x", temperature=0.1 + 0.2, top_p=1 / 3, seed=2**63 + 1), history=((1, 2), (3,))))
    here.submit(request("y"))
    for _ in range(3):
        here.step()
    manifest = from_bytes(to_bytes(here.manifest("x")))
    assert manifest == here.manifest("x")
    mark = from_bytes(to_bytes(there.reserve(manifest)))
    kv = from_bytes(to_bytes(here.export_range("x", mark)))
    there.import_range(kv)
    here.step()
    state = here.export_sequence("x", kv.end)
    there.import_sequence(from_bytes(to_bytes(state)))
    assert there.state.sequences["x"].request == here.scheduler.away["x"].request
    here.reattach("x")
    assert bits(drain(there)["x"]) == bits(drain(here)["x"])


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
