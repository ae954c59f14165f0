"""Cached KV equals a fresh forward's, also the draft's, of which a stale entry would change no token."""

import copy
from typing import Any

import numpy as np
import pytest
from moving import fresh_forward, kv_at
from on_device import BY_COMPANY, DEVICE, LOG_PROB_TOLERANCE

from rlhfspec.engine import Engine, Request, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.tiny import perturbed, random_model

VOCAB = 61
NUM_STEPS = 60 if DEVICE == "cpu" else 12  # attention there takes a row at a time
TREE = DraftPlan(drafter="model", depth=4, width=2, branch=3, max_nodes=4)  # drafts more than it verifies
CHAIN = DraftPlan(drafter="model", depth=3)


def make(model: Any, draft: Any, **options: Any) -> Engine:
    chosen = {"max_sequences": 6, "max_context": 96, "profile": False, "num_threads": 1, "speculation": TREE} | options
    return make_engine(copy.deepcopy(model), EngineConfig(**chosen), draft=copy.deepcopy(draft))


def check(engine: Engine, fresh: Engine) -> int:
    """Compare the cache of every running sequence; return the number of draft positions."""
    compared = 0
    for sequence in engine.scheduler.running:
        row = sequence.row
        for space, other in zip(engine.state.spaces, fresh.state.spaces, strict=True):
            length = int(space.cached[row])
            if length == 0:
                continue
            assert length < engine.state.rows.lengths[row]
            fresh_forward(other.runner, engine.state.rows.tokens[row, :length], np.zeros(1))
            afresh = kv_at(other.runner, np.arange(length))
            found = kv_at(space.runner, space.table.slots[row, :length])
            assert float((found - afresh).abs().max()) <= LOG_PROB_TOLERANCE
        compared += int(engine.state.spaces[1].cached[row])
    return compared


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.on_the_cpu(BY_COMPANY))])
def test_every_cached_position_holds_what_a_fresh_forward_writes(dtype: str) -> None:
    draft = perturbed(model := random_model("qwen3", seed=6, vocab_size=VOCAB), 0.1)
    engine = make(model, draft, dtype=dtype, kv_cache_tokens=480, prefill_chunk=20)
    fresh = make(model, draft, dtype=dtype)
    rng = np.random.default_rng(2)
    compared = 0
    for index in range(14):
        stem = tuple(int(token) for token in np.random.default_rng(index % 3).integers(0, VOCAB, 37))
        params = SamplingParams(max_tokens=int(rng.integers(8, 50)), ignore_eos=True)
        engine.submit(Request(id=str(index), prompt_token_ids=stem, params=params, seed=index))
    for step in range(NUM_STEPS):
        if step % 7 == 3:
            engine.set_speculation([TREE, CHAIN, "off", "suffix"][step // 7 % 4])
        if step % 9 == 5 and engine.scheduler.running:
            engine.preempt(engine.scheduler.running[0].request.id)
        engine.step()
        compared += check(engine, fresh)
    assert compared > 80 * NUM_STEPS


def test_the_draft_cache_lags_at_most_one_step_behind() -> None:
    """Only the last verification's tokens are missing: the chosen one, and at full acceptance the unexpanded leaf."""
    model = random_model("llama", seed=6, vocab_size=VOCAB)
    engine = make(model, perturbed(model, 0.02), speculation=DraftPlan(drafter="model", depth=4))
    for index in range(4):
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        engine.submit(Request(id=str(index), prompt_token_ids=(1, 2, index), params=params, seed=index))
    engine.step()
    engine.step()
    full = 0
    while engine.has_work:
        rows = np.array([sequence.row for sequence in engine.scheduler.running])
        behind = engine.state.rows.lengths[rows] - engine.state.spaces[1].cached[rows]
        assert ((behind >= 1) & (behind <= 2)).all()
        full += int((behind == 2).sum())
        engine.step()
    assert full > 5, "full acceptances happened, and left no gap of more than the leaf"
