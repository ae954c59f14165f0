"""Prompt chunks by FlashAttention, simulated here, have the tokens and numbers of our kernel."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from flash_played import WRONG, have_flash, played
from hypothesis import given, strategies as st
from moving import drain
from on_device import call_again
from sweeps import examples

from rlhfspec.engine import Completion, Engine, Request, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward import chunks, graphs, runner
from rlhfspec.engine.forward.chunks import ChunkedMeta, Chunks, chunk_attention
from rlhfspec.kernels import flash
from rlhfspec.kernels.tree_attention import AttentionMeta, tree_attention_reference
from rlhfspec.tiny import perturbed, random_model

pytestmark = pytest.mark.turns(parts=2)

LEAST = 6
PHRASE = [5, 6, 7, 8, 9, 10, 11]
PROMPTS = [PHRASE * 5, [3, 1], PHRASE * 5, [4] * 20, PHRASE * 5 + [2] * 9, [12, 13, 14] * 11]
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
TREE = DraftPlan(drafter="suffix", depth=4, width=2, branch=2)


def engine_on(device: str = "second:0", *, kind: str = "llama", drafts: bool = False, **options: Any) -> Engine:
    settings = {
        "max_sequences": 8, "max_context": 256, "profile": False, "num_threads": 1, "arithmetic": "torch",
        "speculation": "off", "prefill_chunk": 32,
    } | options  # fmt: skip
    draft = perturbed(random_model(kind, seed=0), 0.1) if drafts else None
    return make_engine(random_model(kind, seed=0), EngineConfig(device=device, **settings), draft=draft)


@pytest.fixture
def taken(second: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rows: list[int] = []

    def counted(query: torch.Tensor, *others: Any, **how: Any) -> torch.Tensor:
        rows.append(len(query))
        return played(query, *others, **how)

    have_flash(monkeypatch, counted, least_rows=LEAST)
    return rows


def same(found: list[Completion], wanted: list[Completion]) -> None:
    assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@functools.cache
def wanted(kind: str = "llama") -> list[Completion]:
    engine = engine_on("cpu", kind=kind, arithmetic="auto")
    return [engine.generate([prompt], PARAMS, seeds=[seed])[0] for seed, prompt in enumerate(PROMPTS)]


WAYS = {"plain": {}, "a chunk of all": {"prefill_chunk": 512}, "trees of suffixes": {"speculation": TREE}}
WAYS |= {"trees of a model": {"speculation": DraftPlan(drafter="model", depth=3, width=2, branch=2), "drafts": True}}
WAYS |= {"nothing shared": {"prefix_sharing": False}}
WAYS |= {kind: {"kind": kind, "speculation": TREE} for kind in ("mistral-window", "qwen3", "gpt-neox")}


@pytest.mark.parametrize("way", WAYS)
def test_prefill_by_flash_attention_gives_the_tokens_of_the_law(taken: list[int], way: str) -> None:
    engine = engine_on(**WAYS[way])
    assert engine.reports["model"].prefill == "varlen_attn"
    taken.clear()
    same(engine.generate(PROMPTS, PARAMS, seeds=range(len(PROMPTS))), wanted(WAYS[way].get("kind", "llama")))
    assert max(taken) > LEAST
    engine.check_integrity()


def test_a_preempted_sequence_recomputes_its_prompt_and_answer(taken: list[int]) -> None:
    engine = engine_on(speculation=TREE)
    for seed, prompt in enumerate(PROMPTS):
        engine.submit(Request(id=str(seed), prompt_token_ids=tuple(prompt), params=PARAMS, seed=seed))
    done: dict[str, Completion] = {}
    for step in range(200):
        done |= {each.id: each for each in engine.step().finished}
        if not engine.has_work:
            break
        if step in (3, 8, 9):
            for seed in (0, 3, 4):
                engine.preempt(str(seed))
    assert engine.stats().num_preemptions > 3
    same([done[str(seed)] for seed in range(len(PROMPTS))], wanted())


def test_a_sequence_moves_on_in_the_midst_of_its_prompt(taken: list[int]) -> None:
    """The sequence moves after accepted branches too, whose slots are out of order."""
    here, there = (engine_on(speculation=TREE) for _ in range(2))
    for steps in (1, 2, 5):
        for engine in (here, there):
            engine.forget_kept()
        here.submit(Request(id="r", prompt_token_ids=tuple(PROMPTS[4]), params=PARAMS, seed=4))
        for _ in range(steps):
            here.step()
        taken.clear()
        there.import_sequence(here.export_sequence("r"))
        assert here.cancel("r")
        same([*drain(there).values()], wanted()[4:5])
        assert bool(taken) is (steps == 1)


def test_a_chunk_can_follow_accepted_tree_branches(taken: list[int]) -> None:
    """The turn's chunk reads slots in any order."""
    found = []
    for speculation in (TREE, "off"):
        engine = engine_on(speculation=speculation, max_context=160)
        engine.submit(Request(id="r", prompt_token_ids=tuple(PHRASE * 5), params=PARAMS, seed=1, stays=True))
        first = drain(engine)["r"]
        taken.clear()
        engine.extend("r", PHRASE * 2, seed=2)
        found.append([first, drain(engine)["r"]])
        assert taken
    same(*found)


def test_graphs_run_only_steps_without_chunks(taken: list[int]) -> None:
    engine = engine_on()
    there = engine.state.target.runner
    there._graphs = graphs.GraphedForward(there._run_layers, torch.device("second:0"), call_again)
    taken.clear()
    same(engine.generate(PROMPTS, PARAMS, seeds=range(len(PROMPTS))), wanted())
    assert taken
    assert there._graphs._captured


def test_unsupported_attention_is_left_to_our_kernel(taken: list[int]) -> None:
    assert engine_on(kind="gemma2").reports["model"].prefill == "own kernel: FlashAttention does not support soft caps"
    device = torch.device("second")
    assert flash.why_not(device, torch.bfloat16, 16, 16, has_sinks=True) == "FlashAttention does not support sinks"
    assert flash.why_not(device, torch.bfloat16, 24, 16) == "FlashAttention does not support heads of size 24 and 16"
    assert flash.why_not(device, torch.float64, 16, 16) == "FlashAttention does not support float64"
    taken.clear()
    assert engine_on(exact="on").reports["model"].prefill == "own kernel: a row's bits must not depend on other rows"
    assert engine_on("cpu").reports["model"].prefill == ""
    assert not taken


def test_devices_without_flash_attention_use_our_kernel(second: Any) -> None:
    assert engine_on().reports["model"].prefill == "own kernel: second has no FlashAttention"


def test_a_wrong_flash_attention_is_detected_and_not_used(second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong, said in WRONG:
        have_flash(monkeypatch, wrong, least_rows=LEAST)
        engine = engine_on()
        assert said in engine.reports["model"].prefill
        same(engine.generate(PROMPTS[:2], PARAMS, seeds=range(2)), wanted()[:2])


sequences = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=4)  # past and tokens


@examples(30, whole=400)
@given(
    decoding=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 4)), max_size=3), prompts=sequences,
    window=st.none() | st.integers(1, 20), kv_heads=st.sampled_from([1, 2, 4]), seed=st.integers(0, 9),
)  # fmt: skip
def test_flash_attention_of_chunks_equals_tree_attention(
    decoding: Any, prompts: Any, window: int | None, kv_heads: int, seed: int
) -> None:
    """The batch has trees, unordered slots and pasts of any length; the cache ends with the same bits."""
    draw = np.random.default_rng(seed)
    num = len(decoding) + len(prompts)
    table = draw.permutation(num * 64).astype(np.int32).reshape(num, 64)
    rows: list[tuple[int, int, int, list[int]]] = []  # slot, row of the table, context, extra
    for row, (length, nodes) in enumerate(decoding):
        rows.append((table[row, length - 1], row, length, []))
        paths: list[list[int]] = []
        for node in range(nodes):
            parent = int(draw.integers(-1, node)) if node else -1
            paths.append([*(paths[parent] if parent >= 0 else []), int(table[row, length + node])])
            rows.append((paths[-1][-1], row, length, paths[-1]))
    for row, (past, count) in enumerate(prompts, start=len(decoding)):
        rows += [(table[row, past + place], row, past + place + 1, []) for place in range(count)]
    extra = np.full((len(rows), 4), -1, np.int32)
    for place, (*_, path) in enumerate(rows):
        extra[place, : len(path)] = path
    meta = AttentionMeta(*(np.array(each, np.int32) for each in list(zip(*rows, strict=True))[:3]), extra, table)
    found = Chunks.of(meta, least_rows=LEAST, most_keys=1 << 20)
    assert (found is None) is all(count < LEAST for _, count in prompts)
    if found is None:
        return
    first = next(place for place, (_, count) in enumerate(prompts) if count >= LEAST)
    assert found.first_row == len(rows) - sum(count for _, count in prompts[first:])
    drawn = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(len(rows), heads, 8, generator=drawn) for heads in (4, kv_heads, kv_heads))
    caches = [torch.randn(num * 4, 2, 2, 16, kv_heads, 8, generator=drawn)]
    caches.append(caches[0].clone())
    options = {"scale": 0.3, "sliding_window": window, "split": 4096}
    with pytest.MonkeyPatch.context() as patch:
        have_flash(patch)
        patch.setattr(chunks, "tree_attention", tree_attention_reference)
        there = ChunkedMeta.of(meta, found, torch.device("cpu"))
        out = chunk_attention(query, key, value, caches[0], 1, there, **options)
    expected = tree_attention_reference(query, key, value, caches[1], 1, meta, **options)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(caches[0], caches[1])


def test_chunks_with_a_tree_or_too_many_keys_are_left_to_our_kernel() -> None:
    context = np.arange(1, 10, dtype=np.int32)
    zeros, none = np.zeros(9, np.int32), np.full((9, 1), -1, np.int32)
    meta = AttentionMeta(context, zeros, context, none, np.zeros((1, 16), np.int32))
    assert Chunks.of(meta, least_rows=9, most_keys=9) is not None
    assert Chunks.of(meta, least_rows=10, most_keys=9) is None
    assert Chunks.of(meta, least_rows=9, most_keys=8) is None
    none[8] = 3
    assert Chunks.of(meta, least_rows=8, most_keys=99) is None


def test_gathering_keys_takes_memory_for_one_sequence(taken: list[int]) -> None:
    there = engine_on().state.target.runner
    assert there.gathered_bytes == 256 * 2 * there.kv_shape[2] * there.kv_shape[3] * 4
    assert runner.LEAST_ROWS == LEAST
