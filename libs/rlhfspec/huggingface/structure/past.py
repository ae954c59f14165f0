"""Simulated past of many positions before a few tokens, at no memory cost."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicLayer

from rlhfspec.huggingface.structure.causal_lm import text_config


class PastLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Cache layer that prepends `length` expanded zeros to new keys and values, and stores nothing."""

    is_compileable = False

    def __init__(self, length: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.length = length

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any,
               ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        return self._behind(key_states), self._behind(value_states)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def _behind(self, states: torch.Tensor) -> torch.Tensor:
        shape = (*states.shape[:-2], self.length, states.shape[-1])
        return torch.cat([states.new_zeros(()).expand(shape), states], dim=-2)


def past_of(model: Any, length: int) -> dict[str, Any]:
    """Return the cache arguments of a forward after a simulated past of `length` positions (0: no cache)."""
    if not length:
        return {"use_cache": False}
    num_layers = 2 * getattr(text_config(model), "num_hidden_layers", 0) + 64  # some attend several times a layer
    return {"past_key_values": Cache(layers=[PastLayer(length) for _ in range(num_layers)]), "use_cache": True}
