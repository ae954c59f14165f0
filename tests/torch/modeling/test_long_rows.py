import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhfspec.engine.forward import runner
from rlhfspec.sweep.classes import CLASSES_VOCAB_SIZE, tiny_config, tiny_model
from rlhfspec.training.modeling.loading import prepared
from rlhfspec.training.modeling.log_probs import TorchForward
from rlhfspec.training.modeling.packed import pack_sequences
from rlhfspec.training.scoring.log_probs import LogProbScorer

NUM_TOKENS = 4000
BANDS = (0, 500, 1000, 2000, 3000, NUM_TOKENS)
MOST_GROWTH = 1.5  # of the mean error; 1.22 at most was seen
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "factor": 4.0,
    "original_max_position_embeddings": 4096, "short_factor": [1.0 + 0.1 * pair for pair in range(8)],
    "long_factor": [2.0 + pair for pair in range(8)],
}  # fmt: skip
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "qwen2": {}, "qwen3": {}, "mistral": {"sliding_window": 1024}}
FAMILIES |= {"gpt_neox": {"rope_parameters": HALF}}
FAMILIES |= {"phi3": {"rope_parameters": LONGROPE, "max_position_embeddings": 4 * 4096}, "glm": {}, "olmo2": {}}
SHARPENED = ("q_proj", "k_proj", "qkv_proj", "query_key_value", "q_norm", "k_norm")


@torch.no_grad()
def sharp_model(family: str) -> Any:
    changes = {"num_hidden_layers": 2, "max_position_embeddings": 4096} | FAMILIES[family]
    model = tiny_model(tiny_config(family, **changes))
    for name, parameter in model.named_parameters():
        scale = 2.0 if any(part in name for part in SHARPENED) else 1.0
        parameter.copy_((scale * parameter).bfloat16())
    return model


TOKENS = torch.randint(CLASSES_VOCAB_SIZE, (NUM_TOKENS + 1,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.inference_mode()
def in_float32(model: Any) -> Tensor:
    model.set_attn_implementation("sdpa")
    log_probs = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]  # type: ignore[no-any-return]


def scored(model: Any, **options: Any) -> Tensor:
    scorer = LogProbScorer(model, temperature=1.0, max_context=4096, dtype="bfloat16", **options)
    return torch.tensor(scorer.log_probs(TOKENS[:1], TOKENS[1:]))


def growth(found: Tensor, wanted: Tensor) -> list[float]:
    error = (found - wanted).abs()
    bands = [float(error[start:stop].mean()) for start, stop in pairwise(BANDS)]
    print("error by position:", " ".join(f"{band:.4f}" for band in bands))
    return [band / bands[0] for band in bands]


@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_error_in_bfloat16_does_not_grow_with_the_position(family: str) -> None:
    model = sharp_model(family)
    wanted = in_float32(copy.deepcopy(model))
    trained = prepared(copy.deepcopy(model), dtype="bfloat16", max_context=4096)
    with torch.no_grad():
        trainer = TorchForward(trained, 1.0)(pack_sequences([TOKENS[:1]], [TOKENS[1:]])).log_probs
    assert max(growth(trainer, wanted)) < MOST_GROWTH, "trainer"
    assert max(growth(scored(model), wanted)) < MOST_GROWTH, "engine"
    assert max(growth(scored(trained), wanted)) < MOST_GROWTH, "reference: the engine on the trainer's model"


@pytest.mark.whole("rows of thousands of tokens")
def test_the_error_does_not_grow_if_the_engine_computes_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.ModelRunner, "activation_dtype", property(lambda self: self.config.dtype))
    model = sharp_model("llama")
    wanted = in_float32(copy.deepcopy(model))
    assert max(growth(scored(model, arithmetic="torch"), wanted)) < MOST_GROWTH
