"""Tiny models with random weights, one for each attention family under test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    GemmaConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

# 97 is prime: no kernel may rely on a vocabulary that is a multiple of anything.
SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED: dict[str, Any] = {**SHAPE, "num_key_value_heads": 2}  # two query heads share a key head
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=16),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=None),
    "mistral-window": lambda: MistralConfig(**GROUPED, sliding_window=7),
    "gemma": lambda: GemmaConfig(**GROUPED, head_dim=16, tie_word_embeddings=False),
    "gemma2": lambda: Gemma2Config(
        **GROUPED, head_dim=16, query_pre_attn_scalar=16, sliding_window=7, tie_word_embeddings=False
    ),
    "gpt-neox": lambda: GPTNeoXConfig(**SHAPE),
    "phi": lambda: PhiConfig(**GROUPED),
    "llama-tied": lambda: LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "phi3": lambda: Phi3Config(**GROUPED),
}
MODEL_KINDS = tuple(CONFIGS)


def random_model(
    kind: str,
    *,
    seed: int,
    vocab_size: int = SHAPE["vocab_size"],
    num_layers: int = SHAPE["num_hidden_layers"],
    head_dim: int | None = None,
) -> PreTrainedModel:
    """Return a float32 model of this kind, in evaluation mode, with logits of standard deviation about 3."""
    config = CONFIGS[kind]()
    config.vocab_size = vocab_size
    if head_dim is not None:
        config.hidden_size = head_dim * config.num_attention_heads
        config.head_dim = head_dim
    if num_layers != config.num_hidden_layers:
        given = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
        config = type(config).from_dict(given | {"num_hidden_layers": num_layers})
    return _random(config, seed)


def large_kv_model(*, vocab_size: int = SHAPE["vocab_size"]) -> PreTrainedModel:
    """Return a narrow model with 64 KiB of bfloat16 KV per token, which makes moves expensive."""
    config = LlamaConfig(
        **SHAPE
        | {"vocab_size": vocab_size, "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 16}
        | {"num_key_value_heads": 16, "head_dim": 128, "max_position_embeddings": 4096}
    )
    return _random(config, seed=1)


def _random(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    model.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # biases and norm weights start at constants; no test should rely on that
            parameter.add_(0.1 * torch.randn(parameter.shape))
        else:
            parameter.mul_(5.0)
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    tokens = torch.randint(config.vocab_size, (4, 32))
    head.weight.mul_(3.0 / model(tokens).logits.std())  # if tied to the embedding, norms even it out
    return model.eval()  # type: ignore[no-untyped-call,no-any-return]
