"""Log-probs of response tokens under log_softmax(logits / temperature); `PolicyForward` is the interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhfspec.huggingface.structure.causal_lm import CausalLM
from rlhfspec.training.modeling.packed import PackedRow, hidden_states

LOGITS_AT_A_TIME = 1 << 26  # 256 MB in float32; more are computed in parts, and again in the backward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogProbs:
    """Log-probs and entropy of t response tokens, float32 whatever the model computes in."""

    log_probs: torch.Tensor  # [t] of the policy that is trained, with its gradient
    untempered: torch.Tensor  # [t] at temperature 1, detached
    entropy: torch.Tensor  # [t] of the policy; carries a gradient only when that was asked for


class PolicyForward(Protocol):
    """Forward of the trained model; its parameters receive the gradients."""

    def __call__(self, batch: PackedRow, *, entropy_gradient: bool = False) -> TokenLogProbs: ...

    def weights_changed(self) -> None:
        """Drop everything derived from the parameters, after an optimizer step."""
        ...


class TorchForward(nn.Module):
    """Forward of the plain Hugging Face model; a module, so that sharding hooks see trunk and head in one forward."""

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.parts = CausalLM(model)
        self.temperature = temperature

    def forward(self, batch: PackedRow, *, entropy_gradient: bool = False) -> TokenLogProbs:
        hidden = self.hidden(batch)  # [t, hidden]
        size = max(1, LOGITS_AT_A_TIME // self.parts.anatomy.vocab_size)
        if len(hidden) <= size:
            return TokenLogProbs(**self._of(hidden, batch.targets, entropy_gradient))
        parts = [
            checkpoint(self._of, rows, targets, entropy_gradient, use_reentrant=False)
            for rows, targets in zip(torch.split(hidden, size), torch.split(batch.targets, size), strict=True)
        ]
        return TokenLogProbs(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]})

    def weights_changed(self) -> None: ...

    def hidden(self, batch: PackedRow) -> torch.Tensor:
        return hidden_states(self.parts.trunk, batch)

    def _of(self, hidden: torch.Tensor, targets: torch.Tensor, entropy_gradient: bool) -> dict[str, torch.Tensor]:
        logits = self.parts.logits(hidden)  # [t, vocab] float32
        tempered = logits if self.temperature == 1 else logits / self.temperature
        log_probs = of_targets(tempered, targets)
        with torch.no_grad():
            untempered = log_probs.detach() if self.temperature == 1 else of_targets(logits, targets)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = entropy_of(tempered)
        return {"log_probs": log_probs, "untempered": untempered, "entropy": entropy}


def of_targets(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -nn.functional.cross_entropy(logits, targets, reduction="none")


def entropy_of(logits: torch.Tensor) -> torch.Tensor:
    log_probs = logits.log_softmax(dim=-1)
    return -(log_probs.exp() * log_probs).sum(dim=-1)
