"""Unmodified Hugging Face models in the engine, with windows of every size: logits, the law, refusals."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, strategies as st
from on_device import BY_COMPANY
from sweeps import examples

from rlhfspec.engine import Engine, Request, SamplingParams, oracle
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.forward import runner
from rlhfspec.errors import UnsupportedModel
from rlhfspec.sweep.classes import CLASSES_VOCAB_SIZE, tiny_config, tiny_model
from rlhfspec.sweep.ways import check_same, moving, one_by_one, together
from rlhfspec.testing.engine import log_probs_of
from rlhfspec.tiny import MODEL_KINDS, perturbed, random_model

pytestmark = pytest.mark.turns(parts=2)

VOCAB = 61
TREE = DraftPlan(drafter="model", depth=4, width=2, branch=2)


def make(model: Any, **options: Any) -> Engine:
    chosen = {"max_sequences": 4, "max_context": 96, "profile": False, "num_threads": 1, "speculation": TREE} | options
    return make_engine(copy.deepcopy(model), EngineConfig(**chosen), draft=perturbed(model, 0.1))


@pytest.mark.sweep(parts=2)
@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_log_probs_are_hugging_faces_and_speculation_changes_no_bit(kind: str) -> None:
    model = random_model(kind, seed=5, vocab_size=VOCAB)
    prompts = [[1, 2, 3, 4, 5], [7] * 33, [9, 8]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    drafted = make(model).generate(prompts, params, seeds=[1, 2, 3])
    plain = make(model, speculation="off", prefill_chunk=11)
    for prompt, done, seed in zip(prompts, drafted, [1, 2, 3], strict=True):
        np.testing.assert_allclose(done.log_probs, log_probs_of(model, done), atol=1e-5)
        [alone] = plain.generate([prompt], params, seeds=[seed])
        assert (done.token_ids, done.log_probs) == (alone.token_ids, alone.log_probs)
        assert done.stats.num_accepted > 0


@pytest.mark.proves_anew
def test_a_wrong_attention_is_detected_at_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias inside one layer passes the configuration checks; the self check finds it."""
    model = random_model("llama", seed=2, vocab_size=VOCAB)
    genuine = runner.tree_attention

    def without_scale(*arguments: Any, **keywords: Any) -> torch.Tensor:
        return genuine(*arguments, **(keywords | {"scale": keywords["scale"] * 3}))

    monkeypatch.setattr(runner, "tree_attention", without_scale)
    with pytest.raises(UnsupportedModel, match="logits differ from Hugging Face's"):
        make(model)


SPECULATIONS = ("off", "suffix", "model", "adaptive", TREE)
MAX_CONTEXT = 430


def requests(lengths: tuple[int, int], seed: int) -> list[Request]:
    draw = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.9, max_tokens=24, ignore_eos=True)
    prompts = [tuple(draw.integers(0, CLASSES_VOCAB_SIZE, length).tolist()) for length in lengths]
    return [Request(id=str(n), prompt_token_ids=p, params=params, seed=seed + n) for n, p in enumerate(prompts)]


def preempt(engine: Engine, step: int) -> None:
    if step in (5, 50) and engine.scheduler.running:
        engine.preempt(engine.scheduler.running[0].request.id)


@pytest.mark.on_the_cpu(BY_COMPANY)
@given(window=st.integers(1, 200), lengths=st.tuples(st.integers(1, 400), st.integers(1, 400)), seed=st.integers(0, 99))
@example(window=1, lengths=(1, 40), seed=1)
@example(window=24, lengths=(50, 399), seed=2)
@example(window=200, lengths=(199, 201), seed=3)
@examples(1, whole=12)
def test_sliding_windows_give_the_tokens_of_the_oracle(window: int, lengths: tuple[int, int], seed: int) -> None:
    make = partial(tiny_model, tiny_config("mistral", sliding_window=window, num_hidden_layers=2))
    wanted = requests(lengths, seed)
    usual = EngineConfig(max_context=MAX_CONTEXT, max_sequences=2, kv_cache_tokens=1600, profile=False, num_threads=1)
    plain = make_engine(make(), replace(usual, speculation="off"))
    assert plain.reports["model"].attentions == (f"4 heads of 16 over 2, scale 0.25, window {window}",)
    alone = one_by_one(plain, wanted)
    hf = make().double()  # so that the roundings are ours alone
    hf.set_attn_implementation("eager")
    for each in wanted:
        ours = alone[each.id]
        with torch.inference_mode():
            theirs = oracle.decode(hf, list(each.prompt_token_ids), each.params, each.seed, forced=list(ours.token_ids))
        margins = zip(ours.token_ids, theirs.token_ids, theirs.margins, strict=True)
        assert all(token == wanted_token or margin < 1e-5 for token, wanted_token, margin in margins)
        np.testing.assert_allclose(ours.log_probs, theirs.log_probs, atol=1e-5, rtol=0)
    for speculation in SPECULATIONS:
        ways = replace(usual, speculation=speculation, prefill_chunk=13, num_threads=2)
        other = make_engine(make(), ways, draft=perturbed(make(), 0.1))
        check_same(f"{speculation}, together, in chunks, with two threads", alone, together(other, wanted))
        check_same(f"{speculation}, preempted", alone, together(other, wanted, every_step=preempt))
        check_same(f"{speculation}, moving", alone, moving(other, plain, wanted))
