"""Prompts outlive their sequences: blocks are reused with the same bits."""

import functools
from collections.abc import Callable

import numpy as np
import pytest
from moving import PROMPT, SUFFIX, TREE, alone, at_once, bits, drain, in_rounds, make, request
from on_device import BY_COMPANY

from rlhfspec.engine import Completion, Engine, Request
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.kv.space import KVSpace

WHOLE_BLOCKS, TAILS = (26, 26, 26, 26, 27, 29), (16, 16, 12, 10, 10, 10)  # six prompts of 2,634 tokens
NUM_SAMPLES, NUM_ROWS = 16, 6
SHORTEST, LONGEST = 4, 20  # answers


def tokens(*, seed: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, 250, count).tolist())


PROMPTS = [tokens(seed=i, count=16 * w + t) for i, (w, t) in enumerate(zip(WHOLE_BLOCKS, TAILS, strict=True))]
DISTINCT = sum(map(len, PROMPTS))
assert DISTINCT == 2634


@functools.cache
def an_engine() -> Engine:
    return make(max_sequences=NUM_ROWS, max_context=512, prefill_chunk=4096, draft=None, speculation="off")


def run(engine: Engine, *requests: Request) -> dict[str, Completion]:
    for each in requests:
        engine.submit(each)
    return drain(engine)


class Counted:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.before = engine.stats()
        self.done: dict[str, Completion] = {}

    def run(self, requests: list[Request]) -> None:
        self.done |= run(self.engine, *requests)

    @property
    def num_run(self) -> int:
        return self.engine.stats().num_prefill_tokens - self.before.num_prefill_tokens


def sample(group: int, replica: int) -> Request:
    number = group * NUM_SAMPLES + replica
    length = int(np.random.default_rng(number).integers(SHORTEST, LONGEST + 1))
    return request(f"{group}/{replica}", PROMPTS[group], seed=number, max_tokens=length)


def interleaved(counted: Counted) -> None:
    counted.run([sample(group, replica) for replica in range(NUM_SAMPLES) for group in range(len(PROMPTS))])


def in_order(counted: Counted) -> None:
    for group in range(len(PROMPTS)):
        counted.run([sample(group, replica) for replica in range(NUM_SAMPLES)])


def chats(counted: Counted) -> None:
    prompts = [tokens(seed=99, count=200)] * 6
    for turn in range(5):
        prompts = [prompt + tokens(seed=100 + 10 * chat + turn, count=30) for chat, prompt in enumerate(prompts)]
        names = [f"{chat}/{turn}" for chat in range(6)]
        counted.run([request(name, prompt, max_tokens=24) for name, prompt in zip(names, prompts, strict=True)])
        prompts = [prompt + counted.done[name].token_ids for name, prompt in zip(names, prompts, strict=True)]


def preempted(counted: Counted) -> None:
    for group, prompt in enumerate(PROMPTS):
        counted.engine.submit(request(str(group), prompt, seed=group))
    for _ in range(13):
        counted.engine.step()
    for name in "123":
        assert counted.engine.preempt(name)
    counted.before = counted.engine.stats()
    counted.done |= drain(counted.engine)


Case = Callable[[Counted], None]
# (prompt tokens run when forgotten, kept and without tails, kept)
CASES: dict[Case, tuple[int, int, int]] = {interleaved: (24_544, 3744, DISTINCT), in_order: (3744, 3744, DISTINCT)}
CASES |= {chats: (5340, 1884, 1884), preempted: (1324, 79, 42)}


def outcome(case: Case, *, keeps: bool, tails: bool) -> tuple[int, dict[str, object]]:
    engine = an_engine()
    engine.scheduler.drop_kv()
    engine.state.pool.keeps = keeps
    counted = Counted(engine)
    with pytest.MonkeyPatch.context() as patch:
        if not tails:
            patch.setattr(KVSpace, "copy_later", lambda *given: None)
        case(counted)
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return counted.num_run, {name: bits(done) for name, done in counted.done.items()}


@pytest.mark.on_the_cpu(BY_COMPANY)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_kept_prompts_are_not_run_again(case: Case) -> None:
    forgotten, without_tails, kept = CASES[case]
    expected = outcome(case, keeps=False, tails=False)
    ours = [outcome(case, keeps=True, tails=False), outcome(case, keeps=True, tails=True)]
    print(case.__name__, expected[0], *(num_run for num_run, _ in ours))
    assert [each for _, each in ours] == [expected[1]] * 2, "the same tokens and log-probs"
    for num_run, figure in zip((expected[0], *(x for x, _ in ours)), (forgotten, without_tails, kept), strict=True):
        assert abs(num_run - figure) <= figure / 10


@pytest.mark.parametrize("speculation", ["off", TREE, SUFFIX])
def test_a_prompt_that_comes_again_is_found_and_only_its_last_token_runs(speculation: str | DraftPlan) -> None:
    engine = make(speculation=speculation)
    assert bits(run(engine, request("first"))["first"]) == alone()
    before = engine.stats()
    assert (before.num_prefill_tokens, before.num_found_tokens) == (len(PROMPT), 0)
    assert (before.num_kept_blocks, before.num_free_blocks) == (3, before.num_blocks)
    engine.submit(request("again", seed=8))
    report = engine.step()
    assert (report.num_prefill_tokens, report.num_decoding) == (0, 1)
    after = engine.stats()
    assert (after.num_prefill_tokens, after.num_found_tokens) == (len(PROMPT), len(PROMPT) - 1)
    assert bits(drain(engine)["again"]) == alone(8)


def test_the_draft_model_reuses_its_own_kept_blocks() -> None:
    engine = make(speculation=TREE)
    target, draft = engine.state.spaces
    for name, cached in (("first", 0), ("again", len(PROMPT) - 1)):
        engine.submit(request(name))
        engine.scheduler.admit()
        assert draft.cached[engine.state.sequences[name].row] == cached
        drain(engine)
    engine.set_speculation("off")
    run(engine, request("other", PROMPT[::-1]))
    engine.set_speculation(TREE)
    engine.submit(request("other", PROMPT[::-1], seed=8))
    engine.scheduler.admit()
    row = engine.state.sequences["other"].row
    assert (target.cached[row], draft.cached[row]) == (len(PROMPT) - 1, 0)
    assert bits(drain(engine)["other"]) == alone(8, prompt=PROMPT[::-1])


def test_the_prompt_used_longest_ago_gives_way_its_end_first() -> None:
    engine = make(speculation="off", kv_cache_tokens=16 * 12, max_sequences=2)
    prompts = [tokens(seed=seed, count=40) for seed in range(4)]
    for index, prompt in enumerate((*prompts[:3], prompts[0])):  # 3 blocks each; the first one is used again
        run(engine, request(f"{index}", prompt, max_tokens=2))
    assert engine.stats().num_kept_blocks == 9
    run(engine, request("large", tokens(seed=9, count=60), max_tokens=2))
    assert engine.stats().num_kept_blocks == 12
    run(engine, request("larger", tokens(seed=10, count=10), max_tokens=2))  # one more block, of the second prompt
    found = []
    for index, prompt in enumerate(prompts[:3]):
        sequence = engine.state.new_sequence(request(f"{index}", prompt), None)  # type: ignore[arg-type]
        there = engine.scheduler.prefixes.find(sequence)
        found.append((len(there.blocks), there.tail is not None))
    assert found == [(2, True), (1, False), (2, True)]


def test_kept_blocks_shared_by_a_new_sequence_do_not_count_as_free() -> None:
    """Admission counts reclaimed blocks as taken; otherwise it would overcommit."""
    engine = make(speculation="off", kv_cache_tokens=16 * 7, max_sequences=4)
    long = tokens(seed=1, count=70)  # 5 blocks
    run(engine, request("long", long, max_tokens=2))
    assert engine.stats().num_kept_blocks == 5
    engine.submit(request("other", tokens(seed=2, count=34), max_tokens=12))  # holds three of the seven
    engine.step()
    engine.submit(request("again", long, max_tokens=20))
    engine.step()
    engine.check_integrity()
    assert engine.stats().num_running == 1, "the four that are free are its prompt's, and it needs one more"
    assert bits(drain(engine)["again"]) == alone(max_tokens=20, prompt=long)


def test_forget_kept_frees_only_blocks_not_in_use() -> None:
    engine = make()
    run(engine, request("first"))
    engine.submit(request("runs", PROMPT[::-1]))
    engine.step()
    engine.forget_kept()
    engine.check_integrity()
    assert engine.stats().num_kept_blocks == 0
    before = engine.stats().num_prefill_tokens
    assert bits(run(engine, request("again", PROMPT), request("sibling", PROMPT[::-1]))["again"]) == alone()
    assert engine.stats().num_prefill_tokens - before == len(PROMPT), "the sibling's is there"


@pytest.mark.proves_anew
def test_measuring_costs_writes_over_what_is_kept() -> None:
    engine = make(speculation="off", profile=True)
    run(engine, request("first"))
    assert engine.stats().num_kept_blocks == 3
    engine.set_speculation("model")
    assert engine.stats().num_kept_blocks == 0
    assert bits(run(engine, request("again"))["again"]) == alone()


def test_blocks_of_a_moved_sequence_are_kept_too() -> None:
    here, there = make(), make()
    for way in (at_once, in_rounds):
        here.submit(request("x"))
        here.step()
        here.step()
        way(here, there, "x", np.random.default_rng(1))
        assert bits(drain(there)["x"]) == alone()
        drain(here)
    there.submit(request("again", seed=8))
    assert there.step().num_prefill_tokens == 0
    here.submit(request("late", seed=9))
    assert there.reserve(here.manifest("late")).positions == (32, 32), "nor is it sent again"
    assert there.cancel("late")
    assert bits(drain(there)["again"]) == alone(8)


def test_siblings_that_come_together_run_their_prompt_once_and_copy_its_tail() -> None:
    engine = make(speculation=TREE)
    for prompt in (PROMPT, PROMPT[:9], PROMPT[:33]):  # with a tail, shorter than a block, and of whole blocks only
        before = engine.stats().num_prefill_tokens
        done = run(engine, *(request(str(seed), prompt, seed=seed, max_tokens=8) for seed in range(5)))
        assert engine.stats().num_prefill_tokens - before == len(prompt)
        assert [bits(done[str(seed)]) for seed in range(5)] == [alone(seed, 8, prompt) for seed in range(5)]
        engine.scheduler.drop_kv()


def test_a_prompt_tail_is_copied_though_its_block_is_reassigned() -> None:
    """The newcomer copies the block first, and the next one does not read it before it is written."""
    engine = make(speculation="off", kv_cache_tokens=16 * 8, max_sequences=3)
    prompt = tokens(seed=3, count=48)  # two whole blocks, and 15 tokens behind them
    run(engine, request("stays", stays=True, max_tokens=13), request("first", prompt, max_tokens=2))
    assert (engine.stats().num_kept_blocks, engine.stats().num_free_blocks) == (3, 4)
    done = run(engine, *(request(str(seed), prompt, seed=seed, max_tokens=12) for seed in (1, 2)))
    assert engine.stats().num_prefill_tokens == len(PROMPT) + len(prompt)
    assert [bits(done[str(seed)]) for seed in (1, 2)] == [alone(seed, 12, prompt) for seed in (1, 2)]


def test_on_a_device_whose_kernels_are_torch_tails_are_copied_by_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhfspec.kernels.kv_pack._kernel", lambda: None)
    engine = make()
    done = run(engine, *(request(str(seed), seed=seed) for seed in range(3)))
    assert engine.stats().num_prefill_tokens == len(PROMPT)
    assert [bits(done[str(seed)]) for seed in range(3)] == [alone(seed) for seed in range(3)]
