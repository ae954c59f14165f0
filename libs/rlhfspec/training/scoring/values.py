"""Critic values of responses on the engine's kernels, with the guarantees of `log_probs`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from rlhfspec.errors import WeightsVersionError
from rlhfspec.huggingface.structure.causal_lm import hidden_of
from rlhfspec.training.modeling.critic import Critic
from rlhfspec.training.scoring.log_probs import Pair, Scored, SequenceRows, one_of


class ValueScorer:
    """Thread-safe scorer of responses by a copy of the critic."""

    def __init__(
        self, critic: Critic, *, max_context: int, version: int = 0, device: str = "cpu", keep_prompts: bool = True
    ) -> None:
        self.version = version
        model = ScoredCritic(critic)
        self._rows = SequenceRows(
            model, "critic", max_context=max_context, dtype="float32", arithmetic="auto", device=device,
            keep_prompts=keep_prompts,
        )  # fmt: skip
        self._rows.load_weights(critic.state_dict())
        self.report = self._rows.runner.report
        self.at_once = self._rows.at_once

    def values(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> list[float]:
        return one_of(self.values_of([(prompt_token_ids, token_ids)]))

    def values_of(self, pairs: Sequence[Pair]) -> list[Scored]:
        return self._rows.numbers_of(pairs, lambda output, _: output[:, 0], "critic value")

    def load_weights(self, state_dict: dict[str, torch.Tensor], version: int) -> None:
        """Load a critic's `state_dict()`. Raise WeightsVersionError if it is older than the loaded one."""
        if version < self.version:
            raise WeightsVersionError(version, self.version, "the critic's weights are older than the loaded ones")
        self._rows.load_weights(state_dict)
        self.version = version


class ScoredCritic(nn.Module):
    """Critic copy as a causal LM, with a random head because zeros would hide errors from verification."""

    def __init__(self, critic: Critic) -> None:
        super().__init__()
        self.trunk = copy.deepcopy(critic.trunk)
        self.score = _random_head(critic.score.in_features)
        self.config = self.trunk.config
        self.eval()

    @property
    def only_head(self) -> nn.Module:
        return self.score

    def forward(self, input_ids: torch.Tensor, **keywords: Any) -> CausalLMOutput:
        hidden = hidden_of(self.trunk(input_ids=input_ids, **keywords))
        return CausalLMOutput(logits=self.score(hidden))

    def get_input_embeddings(self) -> Any:
        return self.trunk.get_input_embeddings()

    def set_attn_implementation(self, name: str) -> None:
        self.trunk.set_attn_implementation(name)


def _random_head(width: int) -> nn.Linear:
    generator = torch.Generator().manual_seed(0)
    head = nn.Linear(width, 1)
    with torch.no_grad():
        head.weight.copy_(torch.randn(1, width, generator=generator))
        head.bias.zero_()
    return head
