"""Scorers of log-probs on small models."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhfspec.tiny import random_model
from rlhfspec.training.scoring.log_probs import LogProbScorer

CONTEXT = 128


def make_scorer(kind: str = "llama", temperature: float = 0.7, **options: Any) -> LogProbScorer:
    return LogProbScorer(random_model(kind, seed=2), temperature=temperature, max_context=CONTEXT, **options)


def row_sensitive_scorer(context: int) -> LogProbScorer:
    """In torch's own arithmetic, which is another one for few rows than for many."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=320, intermediate_size=640, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=context, initializer_range=0.1,
    )  # fmt: skip
    return LogProbScorer(LlamaForCausalLM(config).eval(), temperature=0.7, max_context=context, arithmetic="torch")
