"""The one law: speculation, batching, preemption and sharing change when a token appears, never which."""

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from moving import DRAFTS_FOR_ITSELF
from sweeps import examples

from rlhfspec.engine import Completion, Engine, Request, SamplingParams, oracle
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.distilling import learning as distilling
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.huggingface.heads.eagle import new_head
from rlhfspec.testing.engine import bits
from rlhfspec.tiny import perturbed, random_model

VOCAB = 61
TREE = DraftPlan(drafter="model", depth=4, width=2, branch=3)
CHAIN = DraftPlan(drafter="model", depth=3, width=1, branch=1)
SUFFIX_TREE = DraftPlan(drafter="suffix", depth=4, width=2, branch=2)
MODES: tuple[str | DraftPlan, ...] = ("suffix", "model", "adaptive", TREE, CHAIN, SUFFIX_TREE)


def engine_for(model: Any, *, dtype: str = "float32", draft: Any = None, **options: Any) -> Engine:
    settings_ = {"max_sequences": 8, "max_context": 96, "profile": False, "num_threads": 1, "dtype": dtype} | options
    draft = new_head(model, 40) if draft == "head" else draft or perturbed(model, 0.15)
    return make_engine(copy.deepcopy(model), EngineConfig(**settings_), draft=draft)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("llama", seed=3, vocab_size=VOCAB)


ARMS = {
    "float32": {},
    "bfloat16, and learns": {"dtype": "bfloat16", "learning": 1.0, "draft": "head"},
    "self": {"draft": "self"},
}
if not DRAFTS_FOR_ITSELF:
    del ARMS["self"]


@pytest.fixture(scope="module", params=ARMS)
def pair(request: pytest.FixtureRequest, model: Any) -> Iterator[tuple[Engine, Engine]]:
    """Yield a roomy engine without speculation, and a cramped one for all disturbances."""
    options: dict[str, Any] = ARMS[request.param]
    if options.get("draft") == "head":
        model = random_model("llama", seed=3, vocab_size=VOCAB, num_layers=8)
    plain = engine_for(model, dtype=options.get("dtype", "float32"), speculation="off")
    driven = engine_for(model, speculation="adaptive", kv_cache_tokens=352, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distilling, "LESSON_TOKENS", 64)  # so that a few short responses make an optimizer step
        if driven.learning is not None:
            driven.set_speculation(CHAIN)
            for seed in range(0, 400, 8):  # else it drafts nothing that is accepted
                driven.generate([[1, 2, 3]] * 8, SamplingParams(max_tokens=40), seeds=range(seed, seed + 8))
                while driven.learning.learn_while_idle():
                    pass
        yield plain, driven


def some_requests(rng: np.random.Generator, count: int, temperature: float) -> list[Request]:
    stems = [tuple(rng.integers(0, VOCAB, int(rng.integers(1, 40))).tolist()) for _ in range(3)]
    requests = []
    for index in range(count):
        params = SamplingParams(
            temperature=temperature,
            top_k=int(rng.choice([0, 0, 7])),
            top_p=float(rng.choice([1.0, 1.0, 0.8])),
            max_tokens=int(rng.integers(1, 24)),
            stop_token_ids=(5,) if rng.random() < 0.3 else (),
        )
        stem = stems[int(rng.integers(3))]
        seed = int(rng.integers(0, 1 << 63))
        requests.append(Request(id=f"r{index}", prompt_token_ids=stem, params=params, seed=seed))
    return requests


def run(engine: Engine, requests: list[Request], rng: np.random.Generator | None = None) -> dict[str, Completion]:
    """Submit over some steps in random order; preempt at random if an rng is given."""
    engine.forget_kept()  # each run computes its prompts itself; what comes of kept ones, test_engine_memory.py sees
    waiting, done = list(requests), {}
    while waiting or engine.has_work:
        arriving = len(waiting) if rng is None else int(rng.integers(0, 4))
        for request in waiting[:arriving]:
            engine.submit(request)
        waiting = waiting[arriving:]
        if rng is not None and engine.scheduler.running and rng.random() < 0.2:
            victims = engine.scheduler.running
            engine.preempt(victims[int(rng.integers(len(victims)))].request.id)
        for completion in engine.step().finished:
            done[completion.id] = completion
        engine.check_integrity()
    return done


@examples(10, whole=100)
@given(st.integers(0, 1 << 30), st.sampled_from(MODES), st.sampled_from([1.0, 0.7, 0.0]), st.booleans())
def test_tokens_and_log_probs_have_the_same_bits_under_any_schedule(
    pair: tuple[Engine, Engine], seed: int, mode: str | DraftPlan, temperature: float, sharing: bool
) -> None:
    plain, driven = pair
    rng = np.random.default_rng(seed)
    requests = some_requests(rng, int(rng.integers(1, 12)), temperature)
    expected = {request.id: run(plain, [request])[request.id] for request in requests}  # one at a time
    driven.set_speculation(mode)
    chunk = int(rng.choice([3, 17, 512]))
    driven.state.config = dataclasses.replace(driven.state.config, prefix_sharing=sharing, prefill_chunk=chunk)
    results = run(driven, [requests[index] for index in rng.permutation(len(requests))], rng)
    for request in requests:
        assert bits(results[request.id]) == bits(expected[request.id])
    assert driven.stats().num_free_blocks == driven.stats().num_blocks


def test_drafts_are_accepted_in_these_tests(pair: tuple[Engine, Engine]) -> None:
    _, driven = pair
    for mode in (TREE, CHAIN):  # the adaptive ones may rightly find that a tiny model is fastest alone
        driven.set_speculation(mode)
        done = driven.generate([[1, 2, 3]] * 4, SamplingParams(max_tokens=24, ignore_eos=True), seeds=[1, 2, 3, 4])
        assert sum(each.stats.num_accepted for each in done) > 16
        assert sum(each.stats.num_drafted for each in done) >= sum(each.stats.num_accepted for each in done)


def test_preemption_and_shared_prefixes_occur_in_these_tests(model: Any) -> None:
    engine = engine_for(model, speculation=TREE, kv_cache_tokens=256)
    prompt = list(range(40))
    done = engine.generate([prompt] * 8, SamplingParams(max_tokens=40, ignore_eos=True), seeds=list(range(8)))
    assert engine.stats().num_preemptions > 0
    assert sum(each.stats.num_preemptions for each in done) == engine.stats().num_preemptions
    roomy = engine_for(model, speculation="off")
    for i in range(8):
        roomy.submit(Request(id=str(i), prompt_token_ids=tuple(prompt), params=SamplingParams(max_tokens=4), seed=i))
    roomy.step()
    roomy.step()
    assert roomy.stats().num_blocks - roomy.stats().num_free_blocks < 8 * 3  # two whole blocks of the prompt are shared


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_equal_to_the_oracle_in_float64(model: Any, temperature: float) -> None:
    """The oracle is plain Hugging Face in a loop. In float64 no near-tie is excepted, as in float32 by the contract."""
    reference = copy.deepcopy(model).to(torch.float64)
    reference.set_attn_implementation("eager")
    engine = engine_for(model, dtype="float64", speculation=TREE)
    params = SamplingParams(temperature=temperature, max_tokens=20)
    masked = dataclasses.replace(params, top_k=9, top_p=0.9)
    prompts = [[1, 2, 3], [7] * 20, [4]] * 2
    each = [params] * 3 + [masked] * 3
    completions = engine.generate(prompts, each, seeds=list(range(6)))
    for prompt, used, seed, done in zip(prompts, each, range(6), completions, strict=True):
        truth = oracle.decode(reference, prompt, used, seed, forced=list(done.token_ids))
        assert list(done.token_ids) == list(truth.token_ids)
        np.testing.assert_allclose(done.log_probs, truth.log_probs, atol=1e-6)
