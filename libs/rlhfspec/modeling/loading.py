"""From a job's model block to models that take packed rows.

Policy, reference and critic are Hugging Face causal LMs in evaluation mode, so dropout is off and log-probs of one
policy are one number. What packed attention would get wrong is refused by name, and what names do not show by proof:
a packed row of two sequences must give what plain Hugging Face gives one by one.

Example:
    >>> from rlhfspec.tiny import random_model
    >>> prepared(random_model("qwen2", seed=0)).config._attn_implementation
    'rlhfspec_packed'
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlhfspec import job
from rlhfspec.engine import model_support
from rlhfspec.modeling.log_probs import final_logits
from rlhfspec.modeling.packed import hidden_states, pack_sequences, use_packed_attention

_PROBE_TOKENS = 12


def load_policy(model: job.Model, *, seed: int = 0) -> Any:
    """The policy as it begins; with a LoRA block, its update is drawn from the seed and only it takes gradients."""
    policy = load_causal_lm(model.path, field="model.path", dtype=model.dtype)
    if model.lora is not None:
        from rlhfspec.modeling.lora import add_lora

        add_lora(policy, model.lora, seed=seed)
    return policy


def load_reference(model: job.Model) -> Any:
    """What KL is measured against: never trained, so never with an update."""
    path, field = (model.path, "model.path") if model.reference is None else (model.reference, "model.reference")
    return load_causal_lm(path, field=field, dtype=model.dtype).requires_grad_(False)


def load_causal_lm(path: str | Path, *, field: str, dtype: str) -> Any:
    """The model at `path`, a folder or a hub id; `field` is what messages call it."""
    return prepared(model_support.load_model(path, field=field), dtype=dtype)


def prepared(model: Any, *, dtype: str = "float32") -> Any:
    """A causal LM in memory made ready for packed rows, in place."""
    name = type(model).__name__
    model_support.check_config(model.config, name)
    first, second = _probes(int(model.config.vocab_size))
    model.eval()
    expected = torch.cat([model_support.reference_logits(model, tokens) for tokens in (first, second)])
    use_packed_attention(model)
    with torch.inference_mode():
        ours = final_logits(model, hidden_states(model.base_model, _every_row([first, second])))
    model_support.compare_self_check(ours, expected, name=name, exact=model.dtype == torch.float32)
    return model.to(getattr(torch, dtype)).requires_grad_(True)


def _probes(vocab_size: int) -> tuple[list[int], list[int]]:
    generator = torch.Generator().manual_seed(0)
    tokens: list[int] = torch.randint(vocab_size, (2 * _PROBE_TOKENS + 5,), generator=generator).tolist()
    return tokens[:_PROBE_TOKENS], tokens[_PROBE_TOKENS:]


def _every_row(sequences: list[list[int]]) -> Any:
    """Packed so that every token's row is kept: one-token prompts, and a response with a token to spare."""
    return pack_sequences([tokens[:1] for tokens in sequences], [[*tokens[1:], 0] for tokens in sequences])
