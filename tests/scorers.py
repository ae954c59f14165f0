"""Small log-prob scorers and reward models."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.tiny import random_model
from rlhfspec.training.scoring.log_probs import LogProbScorer

CONTEXT = 128


def make_scorer(kind: str = "llama", temperature: float = 0.7, **options: Any) -> LogProbScorer:
    return LogProbScorer(random_model(kind, seed=2), temperature=temperature, max_context=CONTEXT, **options)


def row_sensitive_scorer(context: int) -> LogProbScorer:
    """Return a scorer in torch's own arithmetic, which differs with the number of rows."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=320, intermediate_size=640, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=context, initializer_range=0.1,
    )  # fmt: skip
    return LogProbScorer(LlamaForCausalLM(config).eval(), temperature=0.7, max_context=context, arithmetic="torch")


def classifying_model(kind: str, *, num_labels: int = 1, **options: Any) -> Any:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    shape = {"num_labels": num_labels, "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "pad_token_id": 0}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.1}
    of_its_own = {"gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4}}.get(kind, {})
    config = AutoConfig.for_model(kind, **shape, **layers, **of_its_own, **options)
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()
