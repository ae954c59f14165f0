"""Sequences that move between engines keep tokens and log-probs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from forced_moves import play
from hypothesis import given, strategies as st
from moving import PROMPT, TREE, alone, at_once, bits, check, drain, in_rounds, make, model, request
from sweeps import examples

from rlhfspec.engine import Completion, Engine
from rlhfspec.engine.base import KVRange, Watermark
from rlhfspec.engine.kv.state_bytes import from_bytes, to_bytes
from rlhfspec.errors import InvalidRequest, MalformedRecord, SequenceStateError
from rlhfspec.tiny import perturbed

pytestmark = pytest.mark.turns(parts=2)


@examples(4, whole=20)
@given(seed=st.integers(0, 1 << 20))
def test_forced_to_move_at_random_the_bits_are_those_of_the_unmoved(seed: int) -> None:
    play(seed)


def test_forced_moves_cover_every_outcome() -> None:
    missing = {
        "moved", "moved twice or more", "tokens", "tokens to newer weights", "taken back", "given up", "drafted",
        "preempted", "new weights", "shares a prompt there", "finished in mid-copy", "stopped at a string",
        "refused: room", "refused: epoch", "refused: weights_version",
    }  # fmt: skip
    for seed in (0, 3, 1, 2, 4, 5):
        missing -= {what for what, times in play(seed).items() if times}
        if not missing:
            return
    raise AssertionError(f"never seen: {missing}")


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


def siblings(engine: Engine, count: int, num_steps: int = 6) -> None:
    for index in range(count):
        engine.submit(request(str(index), seed=index))
    for _ in range(num_steps):
        engine.step()


def test_siblings_that_arrive_together_bring_their_prompt_once() -> None:
    """The first sibling promises the prompt to the others, which may land in any order."""
    here, there = make(), make()
    siblings(here, 4)
    used = here.stats().num_blocks - here.stats().num_free_blocks
    marks = {name: there.reserve(here.manifest(name)) for name in "0123"}
    assert [mark.positions for mark in marks.values()] == [(0, 0), (32, 32), (32, 32), (32, 32)]
    there.check_integrity()
    for name in "3102":
        kv = here.export_range(name, marks[name], max_bytes=20_000)
        there.import_range(kv)
        marks[name] = kv.end
        check(here, there)
        here.step()
    for name in "0312":
        there.import_sequence(here.export_sequence(name, marks[name]))
        assert here.cancel(name)
        check(here, there)
    assert there.stats().num_blocks - there.stats().num_free_blocks <= used
    assert not there.scheduler.promised
    there.submit(request("late", seed=9))
    assert there.step().num_prefill_tokens == 0, "nothing of the others was computed again"
    late = there.state.sequences["late"].row
    assert int(there.state.spaces[1].cached[late]) >= 32, "nor does the draft run the prefix again"
    assert there.stats().num_recomputed_tokens == 0
    done = drain(there)
    assert {name: bits(done[name]) for name in "0123"} == {str(seed): alone(seed) for seed in range(4)}


@pytest.mark.parametrize("way", ["cancelled", "settled first", "memory taken", "preempted there"])
def test_a_promised_prompt_that_does_not_arrive_is_recomputed(way: str) -> None:
    here, there = make(), make()
    siblings(here, 3)
    first, second, third = (there.reserve(here.manifest(name)) for name in "012")
    assert second.positions == third.positions == (32, 32)
    for name, mark in (("1", second), ("2", third)):
        there.import_range(here.export_range(name, mark))
    match way:
        case "cancelled":
            assert there.cancel("0")
        case "memory taken":
            assert there.scheduler.reclaim([there.scheduler.arriving["0"]])
        case "preempted there":
            assert here.preempt("0")
            there.cancel("0")
            first = there.reserve(replace(here.manifest("0"), epoch=3))
            assert first.positions == (0, 0), "nobody fills what the others wait for"
            assert there.cancel("0")
    check(there)
    state = here.export_sequence("1", second)
    there.import_sequence(state)
    here.cancel("1")
    check(there)
    assert there.stats().num_recomputed_tokens == state.manifest.num_tokens - 1
    if way == "settled first":  # its sibling comes after it, and brings what it waits for
        kv = here.export_range("0", first)
        there.import_range(kv)
        there.import_sequence(here.export_sequence("0", kv.end))
        assert there.step().num_prefill_tokens == state.manifest.num_tokens - (len(PROMPT) - 1)
    assert bits(drain(there)["1"]) == alone(1)
    there.import_sequence(here.export_sequence("2", third))
    here.cancel("2")
    assert bits(drain(there)["2"]) == alone(2)
    left = {} if way == "settled first" else {"0": alone(0)}
    assert {name: bits(each) for name, each in drain(here).items()} == left
    assert there.stats().num_free_blocks == there.stats().num_blocks or there.cancel("0")


def test_the_learnt_acceptance_of_a_sequence_moves_with_it() -> None:
    here, there = make(), make()
    here.submit(request("x", max_tokens=60))
    while here.state.rows.lengths.max() < 60:
        here.step()
    here.speculation.acceptance.take_over(here.state.sequences["x"].row, [("model", 0.75, 5.0)])
    length = int(here.state.rows.lengths.max())
    at_once(here, there, "x", np.random.default_rng(0))
    assert ("model", 0.75, 5.0) in there.speculation.acceptance.learnt(there.state.sequences["x"].row)
    assert there.step().num_prefill_tokens == 0
    assert [int(space.cached.max()) >= length for space in there.state.spaces] == [True, True], "the draft's KV too"


def test_a_moved_sequence_keeps_its_age() -> None:
    """The sequence is neither the youngest running one nor last in the queue."""
    old, young = make(), make(max_sequences=2)
    old.submit(request("old", seed=1))
    old.step()
    old.scheduler.running[0].arrived -= 60.0  # an age counts no time on the way, which may be long on a busy machine
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


def test_new_weights_during_a_move_leave_one_engine_that_goes_on() -> None:
    weights = perturbed(model(), 0.3).state_dict()
    here, there = make(), make()
    here.submit(request("x"))
    for _ in range(4):
        here.step()
    there.import_range(here.export_range("x", there.reserve(here.manifest("x"))))
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


def test_a_preemption_invalidates_sent_ranges_and_the_sequence_goes_on() -> None:
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


@pytest.mark.parametrize("how", ["finished", "cancelled", "another of its name", "new weights"])
def test_a_sequence_that_ends_in_mid_copy_is_refused_and_frees_its_lease(how: str) -> None:
    here, there = make(), make()
    here.submit(request("x", max_tokens=5 if how == "finished" else 30))
    here.step()
    kv = here.export_range("x", there.reserve(here.manifest("x")))
    there.import_range(kv)
    match how:
        case "finished":
            drain(here)
        case "cancelled" | "another of its name":
            assert here.cancel("x")
        case "new weights":
            here.load_weights(perturbed(model(), 0.1).state_dict(), version=1)
            here.step()
    if how == "another of its name":
        here.submit(request("x", seed=3))
        here.step()
    gone = how in ("finished", "cancelled")
    for call in (here.export_range, here.export_sequence):
        with pytest.raises(InvalidRequest if gone else SequenceStateError, match="no such" if gone else "epoch"):
            call("x", kv.end)
    check(here, there)
    assert there.cancel("x")
    with pytest.raises(SequenceStateError, match="reservation"):
        there.import_range(kv)
    assert there.stats().num_free_blocks == there.stats().num_blocks
    drain(there)
    assert drain(here).keys() == (set() if gone else {"x"})


def test_memory_reserved_for_a_move_never_blocks_other_sequences() -> None:
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
    """The parts are consecutive views, read in place at the destination."""
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


@pytest.mark.parametrize("wrong", [np.empty(8, np.uint8), np.empty(1 << 20, np.int8), np.empty((1024, 1024), np.uint8)])
def test_memory_that_does_not_take_a_range_is_refused(wrong: Any) -> None:
    here = make()
    here.submit(request("x"))
    here.step()
    with pytest.raises(SequenceStateError, match="out"):
        here.export_range("x", Watermark(epoch=here.manifest("x").epoch, positions=(0, 0)), out=wrong)


def test_sequences_lists_running_and_waiting_sequences() -> None:
    engine = make(max_sequences=2, prefill_chunk=24)
    for name in ("a", "b", "c"):
        engine.submit(request(name, PROMPT[::-1] if name == "b" else PROMPT))
    assert [(v.id, v.is_waiting, v.num_prefill) for v in engine.sequences()] == [(name, True, 40) for name in "abc"]
    engine.step()
    a, b, c = engine.sequences()
    assert (a.is_waiting, a.num_prefill, b.num_prefill, c.is_waiting) == (False, 16, 40, True)
    for _ in range(5):
        engine.step()
    length = int(engine.state.rows.lengths[engine.state.sequences["a"].row])
    a = engine.sequences()[0]
    assert (a.num_held, a.num_generated, a.num_prefill) == (length, length - 40, 0)
    engine.preempt("a")
    [a] = [view for view in engine.sequences() if view.id == "a"]
    assert (a.num_held, a.num_prefill, a.is_waiting) == (length, length, True)
    engine.export_sequence("b")
    assert [view.id for view in engine.sequences()] == ["a", "c"]


def test_a_move_through_bytes_keeps_every_bit() -> None:
    here, there = make(), make()
    here.submit(replace(request("x", temperature=0.1 + 0.2, top_p=1 / 3, seed=2**63 + 1), history=((1, 2), (3,))))
    here.submit(request("y"))
    for _ in range(3):
        here.step()
    manifest = from_bytes(to_bytes(here.manifest("x")))
    assert manifest == here.manifest("x")
    kv = from_bytes(to_bytes(here.export_range("x", from_bytes(to_bytes(there.reserve(manifest))))))
    there.import_range(kv)
    here.step()
    there.import_sequence(from_bytes(to_bytes(here.export_sequence("x", kv.end))))
    assert there.state.sequences["x"].request == here.scheduler.away["x"].request
    here.reattach("x")
    assert bits(drain(there)["x"]) == bits(drain(here)["x"])
