"""Mixtures of experts on rlhfspec's kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import _default_apply_gate

from rlhfspec.kernels.linear import PackedGatedMLP, PackedLinear

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm", "num_experts", "config")


def is_experts(module: nn.Module) -> bool:
    """Return whether transformers runs this module through its experts interface."""
    return all(hasattr(module, flag) for flag in _FLAGS) and not module.has_post_expert_norm


def has_plain_gate(module: Any) -> bool:
    """Return whether the gate is exactly activation(first half) * second half."""
    return bool(
        module.has_gate and module.is_concatenated and getattr(type(module), "_apply_gate", None) is _default_apply_gate
    )


class ExpertLoad:
    """Counter of the rows that each expert receives, by the path of its layer."""

    def __init__(self, model: nn.Module) -> None:
        self._counts: dict[str, Tensor] = {}
        for path, module in model.named_modules():
            if isinstance(module, PackedExperts) or (is_experts(module) and not path.endswith(".inner")):
                self._counts[path] = torch.zeros(int(module.num_experts), dtype=torch.int64)
                module.register_forward_pre_hook(partial(self._count, path), with_kwargs=True)

    def rows(self) -> dict[str, tuple[int, ...]]:
        return {path: tuple(counts.tolist()) for path, counts in self._counts.items()}

    def _count(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        experts: Tensor = kwargs["top_k_index"] if "top_k_index" in kwargs else args[1]
        counts = self._counts[path]
        counts += torch.bincount(experts.reshape(-1), minlength=len(counts))[: len(counts)].to(counts.device)


def by_expert(
    hidden_states: Tensor, experts: Tensor, weights: Tensor, num_experts: int, layer: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Return the sum of weight * layer(expert, hidden) over a token's experts, in the router's order.

    Shapes: hidden [T, H], experts and weights [T, k] -> [T, H].

    >>> hidden, experts = torch.ones(2, 1), torch.tensor([[0, 2], [2, 1]])
    >>> weights = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    >>> by_expert(hidden, experts, weights, 3, lambda expert, x: x * 10**expert).flatten().tolist()
    [50.5, 100.0]
    """
    chosen = experts.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=num_experts)
    rows = torch.split(hidden_states[order // experts.shape[1]], counts.tolist())
    parts = torch.cat([layer(expert, some) for expert, some in enumerate(rows) if len(some)])
    parts = parts * weights.reshape(-1)[order, None]
    in_order = parts[torch.argsort(order)].view(*experts.shape, -1)  # [T, k, H]
    return in_order.sum(1)


class PackedExperts(nn.Module):
    """Hugging Face experts with packed weights; `inner` is the original module without its weights."""

    def __init__(self, experts: Any, *, dtype: torch.dtype, arithmetic: str, activation: str | None) -> None:
        super().__init__()
        self.num_experts = int(experts.num_experts)
        self.activation = activation if has_plain_gate(experts) else None  # None: inner's own gate
        up = "gate_up_proj" if experts.has_gate else "up_proj"
        self.weight_names = (up, "down_proj", *((f"{up}_bias", "down_proj_bias") if experts.has_bias else ()))
        self._dtype, self._arithmetic = dtype, arithmetic
        self.mlps: list[PackedGatedMLP] = []  # plain lists: packed weights are no parameters
        self.ups: list[PackedLinear] = []
        self.downs: list[PackedLinear] = []
        self.is_transposed = bool(experts.is_transposed)
        self.load_weights(*(getattr(experts, name) for name in self.weight_names))
        for name in self.weight_names:
            del experts._parameters[name]
        self.inner = experts

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return by_expert(hidden_states, top_k_index, top_k_weights, self.num_experts, self._layer)

    def _layer(self, expert: int, rows: Tensor) -> Tensor:
        if self.activation is not None:
            return self.mlps[expert](rows)  # type: ignore[no-any-return]
        between = gate(self.inner, self.ups[expert](rows))
        return self.downs[expert](between)  # type: ignore[no-any-return]

    @torch.no_grad()
    def load_weights(self, up: Tensor, down: Tensor, up_bias: Tensor | None = None, down_bias: Tensor | None = None,
                     ) -> None:  # fmt: skip
        """Pack weights of E experts: up [E, 2I or I, H], down [E, H, I] (or transposes), biases [E, ...]."""
        for expert in range(self.num_experts):
            matrices = oriented(self, up[expert]), oriented(self, down[expert])
            biases = [None if bias is None else bias[expert].to(self._dtype) for bias in (up_bias, down_bias)]
            self._load_one(expert, *matrices, *biases)

    def _load_one(self, expert: int, up: Tensor, down: Tensor, up_bias: Tensor | None, down_bias: Tensor | None,
                  ) -> None:  # fmt: skip
        kept: dict[str, Any] = {"dtype": self._dtype, "arithmetic": self._arithmetic}
        if self.activation is not None:
            if len(self.mlps) == expert:
                sizes = up.shape[1], up.shape[0] // 2, down.shape[0]
                self.mlps.append(PackedGatedMLP(*sizes, activation=self.activation, **kept))
            gate_weight, up_weight = up.chunk(2)
            biases = (None, None) if up_bias is None else up_bias.chunk(2)
            self.mlps[expert].load_weights(gate_weight, up_weight, down, biases[0], biases[1], down_bias)
            return
        if len(self.ups) == expert:
            self.ups.append(PackedLinear(up.shape[1], up.shape[0], **kept))
            self.downs.append(PackedLinear(down.shape[1], down.shape[0], **kept))
        self.ups[expert].load_weight(up, up_bias)
        self.downs[expert].load_weight(down, down_bias)


def oriented(experts: Any, weight: Tensor) -> Tensor:
    return weight.T if experts.is_transposed else weight


def gate(experts: Any, rows: Tensor) -> Tensor:
    """Return `rows` after the experts module's own code between its two matrix products."""
    return experts._apply_gate(rows) if experts.has_gate else experts.act_fn(rows)  # type: ignore[no-any-return]
