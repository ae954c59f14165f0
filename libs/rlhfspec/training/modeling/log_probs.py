"""Log-probs of response tokens under log_softmax(logits / temperature)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhfspec.huggingface.structure.causal_lm import CausalLM
from rlhfspec.training.modeling.packed import PackedRow, hidden_states

# More logits than these are computed in parts, and again in the backward pass: 256 MB, or a CPU's caches.
LOGITS_AT_A_TIME = 1 << 26
LOGITS_ON_A_CPU = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogProbs:
    """Log-probs and entropy of t response tokens, always float32."""

    log_probs: torch.Tensor  # [t] of the policy that is trained, with its gradient
    untempered: torch.Tensor  # [t] at temperature 1, detached
    entropy: torch.Tensor  # [t] of the policy; carries a gradient only if requested


class PolicyForward(Protocol):
    """Interface of the trained model's forward."""

    def __call__(self, batch: PackedRow, *, entropy_gradient: bool = False) -> TokenLogProbs: ...

    def weights_changed(self) -> None:
        """Drop everything derived from the parameters, which have changed."""
        ...


class TorchForward(nn.Module):
    """Forward of the plain Hugging Face model, as one module for FSDP's hooks."""

    def __init__(self, model: Any, temperature: float) -> None:
        super().__init__()
        self.model = model
        self.parts = CausalLM(model)
        self.temperature = temperature

    def forward(self, batch: PackedRow, *, entropy_gradient: bool = False) -> TokenLogProbs:
        hidden = self.hidden(batch)  # [t, hidden]
        size = max(1, (LOGITS_ON_A_CPU if hidden.is_cpu else LOGITS_AT_A_TIME) // self.parts.anatomy.vocab_size)
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
        all_log_probs = tempered.log_softmax(dim=-1)
        log_probs = -nn.functional.nll_loss(all_log_probs, targets, reduction="none")
        with torch.no_grad():
            untempered = log_probs.detach() if self.temperature == 1 else of_targets(logits, targets)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = entropy_of(all_log_probs)  # last: without a gradient, the backward pass does not repeat it
        return {"log_probs": log_probs, "untempered": untempered, "entropy": entropy}


def of_targets(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -nn.functional.cross_entropy(logits, targets, reduction="none")


def entropy_of(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the entropy of each distribution from its log-probs: [t, vocab] -> [t]."""
    rows = 8 if log_probs.is_cpu else max(1, len(log_probs))  # a few rows stay in a CPU's caches between two reads
    return torch.cat([-(part.exp() * part).sum(dim=-1) for part in torch.split(log_probs, rows)])
