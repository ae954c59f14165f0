"""Unmodified Hugging Face models in the engine: their logits, the law, and refusals by name."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from rlhfspec.engine import Engine, SamplingParams
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.loading import make_engine
from rlhfspec.errors import UnsupportedModel
from rlhfspec.tiny import MODEL_KINDS, perturbed, random_model

VOCAB = 61
TREE = DraftPlan(drafter="model", depth=4, width=2, branch=2)


def make(model: Any, **options: Any) -> Engine:
    chosen = {"max_sequences": 4, "max_context": 96, "profile": False, "num_threads": 1, "speculation": TREE} | options
    return make_engine(copy.deepcopy(model), EngineConfig(**chosen), draft=perturbed(model, 0.1))


@torch.inference_mode()
def hugging_face_log_probs(model: Any, prompt: list[int], response: tuple[int, ...]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0].float()
    picked = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return picked[torch.arange(len(response)), torch.tensor(response)]


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_log_probs_are_hugging_faces_and_speculation_changes_no_bit(kind: str) -> None:
    model = random_model(kind, seed=5, vocab_size=VOCAB)
    prompts = [[1, 2, 3, 4, 5], [7] * 33, [9, 8]]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    drafted = make(model).generate(prompts, params, seeds=[1, 2, 3])
    plain = make(model, speculation="off", prefill_chunk=11)
    for prompt, done, seed in zip(prompts, drafted, [1, 2, 3], strict=True):
        np.testing.assert_allclose(done.log_probs, hugging_face_log_probs(model, prompt, done.token_ids), atol=1e-5)
        [alone] = plain.generate([prompt], params, seeds=[seed])
        assert (done.token_ids, done.log_probs) == (alone.token_ids, alone.log_probs)
        assert done.stats.num_accepted > 0


def test_sliding_windows_are_honoured_past_the_window() -> None:
    config = MistralConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=8, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = MistralForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    prompt = list(range(30))
    [done] = make(model).generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True), seeds=[4])
    model.set_attn_implementation("eager")
    np.testing.assert_allclose(done.log_probs, hugging_face_log_probs(model, prompt, done.token_ids), atol=1e-5)


def test_an_attention_that_bypasses_the_interface_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias inside one layer passes the configuration checks; the self check finds it."""
    model = random_model("llama", seed=2, vocab_size=VOCAB)
    from rlhfspec.engine.forward import runner

    genuine = runner.tree_attention

    def without_scale(*arguments: Any, **keywords: Any) -> torch.Tensor:
        return genuine(*arguments, **(keywords | {"scale": keywords["scale"] * 3}))

    monkeypatch.setattr(runner, "tree_attention", without_scale)
    with pytest.raises(UnsupportedModel, match="logits differ from Hugging Face's"):
        make(model)
