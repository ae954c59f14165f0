"""Samples beside clients: they pause with their KV, by the cost curve and a target. Tokens never depend on it."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from moving import (
    DRAFTS_FOR_ITSELF,
    SUFFIX,
    TREE,
    VOCAB,
    Bits,
    alone,
    at_once,
    bits,
    check,
    drain,
    in_rounds,
    make,
    model,
    request,
)

from rlhfspec.engine import Completion, Engine, Request
from rlhfspec.engine.drafting.cost import TARGET, CostModel, CostTable, host_kind
from rlhfspec.errors import SequenceStateError

TIGHT = 1e-9  # seconds a token that no step keeps
NUM_SAMPLES = 32
Arrivals = Mapping[int, list[Request]]


def chat(name: str, *, seed: int = 9, num_prompt: int = 20, **params: Any) -> Request:
    prompt = tuple((seed * 31 + each * 7) % VOCAB for each in range(num_prompt))
    return replace(request(name, prompt, seed=seed, **params), priority=2)


def sample(index: int) -> Request:
    """Return one of four samples of a prompt, of different lengths."""
    prompt = tuple((index // 4 * 13 + each) % VOCAB for each in range(40))
    return request(f"sample {index}", prompt, seed=index, max_tokens=20 + index % 7 * 2)


def arrivals(every: int = 3) -> Arrivals:
    chats = [chat(f"chat {seed}", seed=100 + seed, num_prompt=5 + 9 * seed, max_tokens=12) for seed in range(8)]
    return {2 + every * index: [each] for index, each in enumerate(chats)}


def with_samples(count: int = NUM_SAMPLES, **options: Any) -> Engine:
    engine = make(max_sequences=count + 4, **options)
    for index in range(count):
        engine.submit(sample(index))
    return engine


def generated(engine: Engine, coming: Arrivals) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    for step in range(1000):
        for each in coming.get(step, ()):
            engine.submit(each)
        if engine.has_work:
            done |= {each.id: each for each in engine.step().finished}
        elif step > max(coming, default=0):
            return done
    raise AssertionError("it never ends")


def samples_of(done: Mapping[str, Completion]) -> dict[str, Bits]:
    return {name: bits(each) for name, each in done.items() if name.startswith("sample")}


def costing(engine: Engine, *, fixed: float = 0.010, per_row: float = 0.001) -> Engine:
    """Give an engine without drafts, which learns no costs, this curve."""
    curve = CostTable([1, 1001], [fixed + per_row, fixed + 1001 * per_row])
    engine.speculation.costs = CostModel({TARGET: curve, host_kind(None): CostTable([1], [0.0])})
    return engine


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, Bits]:
    done = generated(with_samples(speculation="off"), {})
    assert len(done) == NUM_SAMPLES
    return samples_of(done)


@pytest.mark.parametrize("target", [None, TIGHT])
@pytest.mark.parametrize(
    "options",
    [
        {"speculation": "off"},
        {"speculation": TREE},
        {"speculation": SUFFIX},
        {"speculation": "adaptive"},
        {"speculation": "adaptive", "prefill_chunk": 24, "kv_cache_tokens": 2400},
        *[{"speculation": TREE, "draft": "self"}] * DRAFTS_FOR_ITSELF,
    ],
    ids=["plain", "tree", "suffix", "adaptive", "small", *["self"] * DRAFTS_FOR_ITSELF],
)
def test_samples_have_the_same_bits_with_chats_and_without(
    options: dict[str, Any], target: float | None, undisturbed: dict[str, Bits]
) -> None:
    engine = with_samples(target_tpot=target, **options)
    done = generated(engine, arrivals())
    assert samples_of(done) == undisturbed
    chats = [each for coming in arrivals().values() for each in coming]
    assert all(bits(done[each.id]) == alone(each.seed, 12, each.prompt_token_ids) for each in chats)
    check(engine)


def test_paused_samples_move_and_have_the_same_bits(undisturbed: dict[str, Bits]) -> None:
    here, there = with_samples(target_tpot=TIGHT), make(max_sequences=NUM_SAMPLES, target_tpot=TIGHT)
    done = [each for _ in range(3) for each in here.step().finished]
    for engine in (here, there):
        engine.submit(chat(f"chat {id(engine)}", max_tokens=60))
    done += [each for _ in range(3) for each in here.step().finished]
    running = [name for name, _ in sorted(num_generated(here, "sample").items(), key=lambda each: -each[1])]
    for way, names in ((at_once, running[:2] + running[-2:]), (in_rounds, running[2:4] + running[-4:-2])):
        for name in names:
            done += way(here, there, name, np.random.default_rng(0))
            check(here, there)
    found = {each.id: each for each in done} | generated(here, {}) | generated(there, {})
    assert samples_of(found) == undisturbed
    assert sum(each.stats.num_moves for each in found.values()) == 8


def test_paused_samples_survive_a_swap_of_weights(undisturbed: dict[str, Bits]) -> None:
    engine = with_samples(target_tpot=TIGHT)
    engine.submit(chat("chat", max_tokens=60))
    for _ in range(10):
        engine.step()
    engine.load_weights(model().state_dict(), version=1)
    assert samples_of(generated(engine, {})) == undisturbed
    check(engine)


def num_generated(engine: Engine, prefix: str) -> dict[str, int]:
    return {view.id: view.num_generated for view in engine.sequences() if view.id.startswith(prefix)}


def test_samples_pause_with_row_and_kv_while_a_chat_runs_and_are_not_preempted() -> None:
    engine = with_samples(target_tpot=TIGHT, speculation="off")
    for _ in range(5):
        engine.step()
    engine.submit(chat("chat", max_tokens=6))
    before = num_generated(engine, "sample")
    for _ in range(6):
        engine.step()
    after = num_generated(engine, "sample")
    advanced = sorted((after[name] - count for name, count in before.items()), reverse=True)
    assert advanced == [6] * 4 + [0] * 28  # an eighth of them, the oldest
    assert engine.stats().num_running == NUM_SAMPLES
    assert engine.step().num_decoding == NUM_SAMPLES
    assert engine.stats().num_preemptions == 0
    assert all(each.stats.num_preemptions == 0 for each in drain(engine).values())


@pytest.mark.parametrize(
    ("milliseconds", "num_beside"),
    [(25.4, 14), (18.4, 7), (11.0, 4), (100.0, 32), (None, 11)],
    ids=["target", "tighter", "an eighth at least", "all", "twice a chat alone"],
)
def test_the_number_of_samples_beside_a_chat_follows_from_curve_and_target(
    milliseconds: float | None, num_beside: int
) -> None:
    engine = costing(with_samples(target_tpot=milliseconds and milliseconds / 1e3, speculation="off"))
    engine.step()
    engine.submit(chat("chat"))
    engine.step()
    assert engine.step().num_decoding == 1 + num_beside


def test_context_counts_by_its_price() -> None:
    engine = costing(with_samples(target_tpot=0.025, speculation="off"))
    engine.speculation.costs.table(TARGET).per_kv = 1e-5  # a context of 40 tokens and more: .4 ms
    engine.step()
    engine.submit(chat("chat"))
    engine.step()
    assert engine.step().num_decoding == 1 + 9


@pytest.mark.parametrize(("milliseconds", "chunks"), [(60.4, [49, 30]), (11.0, [32, 32, 15]), (None, [32, 32, 15])])
def test_a_prompt_beside_a_chat_runs_in_chunks_that_fit_the_target(
    milliseconds: float | None, chunks: list[int]
) -> None:
    engine = costing(make(target_tpot=milliseconds and milliseconds / 1e3, speculation="off", max_context=256))
    engine.submit(chat("first", max_tokens=40))
    engine.step()
    engine.submit(chat("second", seed=8, num_prompt=79))
    assert [engine.step().num_prefill_tokens for _ in chunks] == chunks
    assert engine.step().num_prefill_tokens == 0


def test_a_prompt_runs_at_once_where_no_chat_waits_for_a_token() -> None:
    engine = costing(with_samples(target_tpot=TIGHT, speculation="off", max_context=256))
    engine.step()
    engine.submit(chat("chat", num_prompt=100))
    report = engine.step()
    assert [report.num_prefill_tokens, report.num_decoding] == [100, 12]  # an eighth of the chat's rows


def test_samples_wait_with_their_prompts_only_until_others_end() -> None:
    engine = costing(make(target_tpot=TIGHT, speculation="off"))
    engine.submit(chat("chat", max_tokens=100))
    engine.step()
    for index in range(2):
        engine.submit(request(f"sample {index}", tuple(range(index, index + 20)), max_tokens=8))
    while any(name.startswith("sample") for name in num_generated(engine, "sample")):
        assert "chat" in num_generated(engine, "chat")
        engine.step()


def test_samples_progress_while_chats_come_without_end(undisturbed: dict[str, Bits]) -> None:
    engine = costing(with_samples(8, target_tpot=TIGHT, speculation="off"))
    done: dict[str, Completion] = {}
    for number in range(400):
        while len(num_generated(engine, "chat")) < 4:
            engine.submit(chat(f"chat {number} {len(engine.sequences())}", seed=number, max_tokens=3))
        done |= {each.id: each for each in engine.step().finished}
        if len(samples_of(done)) == 8:
            break
    assert samples_of(done) == {name: each for name, each in undisturbed.items() if name in samples_of(done)}
    assert number <= 8 * 32  # a token of a sample in each step


def test_a_chat_does_not_wait_for_the_prompt_of_a_paused_sample() -> None:
    engine = costing(with_samples(8, target_tpot=TIGHT, speculation="off"))
    engine.step()
    engine.submit(chat("first", max_tokens=60))
    engine.step()
    late = request("late", tuple(range(100, 150)), seed=1)
    engine.submit(late)
    engine.step()
    assert num_generated(engine, "late") == {"late": 0}
    engine.submit(replace(late, id="second", seed=2, priority=2))
    done: dict[str, Completion] = {}
    while "second" not in done:
        done |= {each.id: each for each in engine.step().finished}
    assert num_generated(engine, "late") == {"late": 0}
    done |= drain(engine)
    for name, seed in (("late", 1), ("second", 2)):
        assert bits(done[name]) == alone(seed, prompt=late.prompt_token_ids)


def test_rows_stay_free_for_the_next_chats_while_one_runs() -> None:
    engine = costing(make(max_sequences=NUM_SAMPLES, speculation="off"))
    for index in range(2 * NUM_SAMPLES):
        engine.submit(sample(index))
    for _ in range(3):
        engine.step()
    engine.submit(chat("first", max_tokens=100))
    while engine.stats().num_running > NUM_SAMPLES - 2:
        engine.step()
    engine.step()
    assert engine.stats().num_running <= NUM_SAMPLES - 2
    assert engine.stats().num_waiting > 2, "samples"
    for number in range(2):
        engine.submit(chat(f"next {number}", max_tokens=100))
    engine.step()
    assert not any(view.is_waiting for view in engine.sequences() if not view.id.startswith("sample"))
    assert engine.stats().num_preemptions == 1
    assert len(samples_of(drain(engine))) > NUM_SAMPLES


def test_requests_without_priority_pause_nobody() -> None:
    engine = costing(with_samples(target_tpot=TIGHT, speculation="off"))
    engine.step()
    engine.submit(replace(chat("chat"), priority=0))
    engine.step()
    assert engine.step().num_decoding == NUM_SAMPLES + 1


def test_costs_are_measured_and_learnt_without_drafts_once_clients_are_served() -> None:
    engine = make(speculation="off", profile=True, draft=None)
    assert not engine.speculation.costs.tables
    engine.speculation.measure()
    curve = engine.speculation.costs.table(TARGET)
    assert curve.seconds(32) > curve.seconds(1) > 0
    engine.submit(request("x"))
    drain(engine)
    assert curve.num_seen > 50


def test_an_old_sample_that_moves_in_waits_behind_a_client() -> None:
    here, there = make(), costing(make(max_sequences=NUM_SAMPLES, speculation="off"))
    here.submit(request("old"))
    here.step()
    here.scheduler.running[0].arrived -= 60.0
    for index in range(NUM_SAMPLES):
        there.submit(chat(f"chat {index}", seed=index, max_tokens=10 + 20 * (index > 1)))
    there.step()
    there.submit(chat("next"))
    there.import_sequence(here.export_sequence("old"))
    assert [each.request.id for each in there.scheduler.waiting] == ["next", "old"]
    while there.stats().num_running == NUM_SAMPLES:
        there.step()
    there.step()
    assert "next" in {each.request.id for each in there.scheduler.running}
    assert [each.request.id for each in there.scheduler.waiting] == ["old"], "two rows stay free"
    done = drain(there)
    assert bits(done["old"]) == alone()


def test_samples_that_move_in_leave_rows_for_the_next_clients() -> None:
    here, there = make(), make(max_sequences=16, speculation="off")
    here.submit(request("sample"))
    here.step()
    for index in range(15):
        there.submit(chat(f"chat {index}", seed=index, max_tokens=100))
    there.step()
    assert there.stats().room == 0
    with pytest.raises(SequenceStateError, match="room"):
        there.reserve(here.manifest("sample"))


def test_prompts_of_samples_run_in_whole_chunks_where_no_sample_decodes() -> None:
    engine = costing(make(target_tpot=TIGHT, speculation="off", max_context=256))
    engine.submit(chat("chat", max_tokens=60))
    engine.step()
    engine.submit(request("sample", tuple(range(70)), seed=1))
    assert [engine.step().num_prefill_tokens for _ in range(3)] == [32, 32, 6]


@pytest.mark.parametrize(
    ("milliseconds", "priority", "num_nodes"), [(16.4, 2, 0), (18.4, 2, 2), (100.0, 2, None), (16.4, 0, None)]
)
def test_tree_nodes_get_the_rows_that_the_target_leaves(
    milliseconds: float, priority: int, num_nodes: int | None
) -> None:
    engine = costing(make(target_tpot=milliseconds / 1e3, speculation=TREE))
    for index in range(5):
        engine.submit(request(f"sample {index}", seed=index, max_tokens=80))
    for _ in range(2):
        engine.step()
    engine.submit(replace(chat("chat"), priority=priority))
    engine.step()
    report = engine.step()
    assert report.num_decoding == 6
    assert report.num_verified_nodes == num_nodes if num_nodes is not None else report.num_verified_nodes > 10
