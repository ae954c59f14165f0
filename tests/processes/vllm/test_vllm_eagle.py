"""An EAGLE-3 head that learnt here drafts in vLLM as it does here."""

import copy
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_children import Children

from rlhfspec.engine import SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import make_engine
from rlhfspec.engine.distilling import before, learning
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.huggingface.heads.eagle import load_head, save_head
from rlhfspec.testing.engine import request, run
from rlhfspec.tiny import random_model

pytestmark = pytest.mark.timeout(900)
VOCAB = 61
CONFIG = EngineConfig(
    max_sequences=8, max_context=160, profile=False, num_threads=1, speculation=DraftPlan(drafter="model", depth=4)
)


def test_vllm_accepts_what_our_engine_accepts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "LESSON_TOKENS", 64)
    monkeypatch.setattr(before, "_SHARE_DRAFTED", 2)
    policy = random_model("llama", seed=5, vocab_size=VOCAB, num_layers=8, head_dim=32)
    policy.save_pretrained(tmp_path / "policy")
    prompts = [[token, 7, token + 1] for token in range(3, 11)]
    params = SamplingParams(max_tokens=64, ignore_eos=True, temperature=0.3)
    learner = before.begin(str(tmp_path / "policy"), None, replace(CONFIG, learning=1.0), prompts, params)
    for seed in range(8):
        learner.generate(prompts, params, seeds=[8 * seed + number for number in range(8)])
        while learner.abilities.learning.learn_while_idle():
            pass
    save_head(before.drafter_of(learner), tmp_path / "head")
    asked = [request(f"r{seed}", (seed, 9, 4), seed=seed, max_tokens=120, temperature=0.3) for seed in range(3, 11)]
    ours = run(make_engine(copy.deepcopy(policy), CONFIG, draft=load_head(tmp_path / "head")), *asked)
    with closing(Children(policy, tmp_path / "head", max_context=160, max_sequences=8)) as children:
        theirs = run(children.engine("eagle3", policy), *asked)
    assert {name: done.token_ids for name, done in ours.items()} == {n: done.token_ids for n, done in theirs.items()}
    rates = [sum(done.stats.num_accepted for done in found.values()) /
             sum(done.stats.num_verifications for done in found.values()) for found in (ours, theirs)]  # fmt: skip
    assert rates[0] > 0.2, "it learnt something"
    assert abs(rates[0] - rates[1]) < 0.02
