"""Specifications of attentions, observed from their arguments and eager masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from rlhfspec.errors import UnsupportedModel

_IGNORED_KEYWORDS = {  # passed by transformers to every attention function; none changes what is computed here
    "dropout", "is_causal", "position_ids", "output_attentions", "output_hidden_states", "output_router_logits",
    "use_cache", "cache_position", "position_embeddings", "past_key_values", "use_flash_attn", "return_dict",
    "layer_idx", "deterministic", "logits_to_keep",
    "sliding_window",  # the mask decides, as in eager attention
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    index: int  # place in the forward, and layer in the KV cache
    path: str = field(default="", repr=False, compare=False)  # of the module; does not affect behaviour
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float  # 0.0: none
    has_sinks: bool
    window: int | None  # a token sees this many, itself included; None: all before it
    chunk: int | None  # a token sees only its own chunk of this many positions

    def __str__(self) -> str:
        size = str(self.key_dim) if self.key_dim == self.value_dim else f"{self.key_dim} (values {self.value_dim})"
        parts = [f"{self.num_heads} heads of {size} over {self.num_kv_heads}", f"scale {self.scale:.6g}"]
        parts += [f"soft cap {self.softcap:g}"] if self.softcap else []
        parts += ["sinks"] if self.has_sinks else []
        parts += [f"{word} {size}" for word, size in (("window", self.window), ("chunks of", self.chunk)) if size]
        return ", ".join(parts)


def cache_shape(specs: Sequence[AttentionSpec]) -> tuple[int, int]:
    heads = max(spec.num_kv_heads for spec in specs)
    if any(spec.num_heads % heads or heads % spec.num_kv_heads for spec in specs):
        counts = sorted({spec.num_kv_heads for spec in specs})
        raise UnsupportedModel("model", counts, "attentions whose numbers of key/value heads do not divide each other")
    return heads, max(max(spec.key_dim, spec.value_dim) for spec in specs)


def fit_cache(states: torch.Tensor, num_heads: int, dim: int) -> torch.Tensor:
    """Fit keys or values [1, heads, N, d] to the cache's [1, num_heads, N, dim], repeating heads, padding zeros."""
    if states.shape[3] != dim:
        states = functional.pad(states, (0, dim - states.shape[3]))
    return states if states.shape[1] == num_heads else states.repeat_interleave(num_heads // states.shape[1], dim=1)


def visible(size: int, spec: AttentionSpec, device: torch.device, *, last: int | None = None) -> torch.Tensor:
    """Return the mask [size, size] of visible keys, or only its `last` rows."""
    place = torch.arange(size, device=device)
    query = place[size - (size if last is None else last) :, None]
    distance = query - place
    seen = distance >= 0
    if spec.window is not None:
        seen &= distance < spec.window
    if spec.chunk is not None:
        seen &= query // spec.chunk == place // spec.chunk
    return seen


def refuse_unknown(module: Any, keywords: dict[str, Any], *, name: str = "model") -> None:
    """Raise UnsupportedModel for an attention argument whose effect is unknown."""
    unknown = [name for name, given in keywords.items() if given is not None and name not in _IGNORED_KEYWORDS]
    if unknown:
        raise UnsupportedModel(name, type(module).__name__, f"passes attention arguments {sorted(unknown)}")


@contextmanager
def attending(model: Any, name: str, function: Any = None, *, masks: bool = False) -> Iterator[None]:
    """Run the model's attentions through `function`, with eager experts and, for `masks`, Hugging Face's eager mask."""
    if function is not None:
        AttentionInterface.register(name, function)
    if masks:
        AttentionMaskInterface.register(name, eager_mask)
    try:
        with as_before(model):
            model.set_attn_implementation(name)
            use_eager_experts(model)
            yield
    finally:
        registered: Any = AttentionInterface
        if function is not None and registered()[name] is function:
            AttentionInterface.register(name, _over)  # the registry may keep a whole model alive


def _over(*_: Any, **__: Any) -> Any:
    raise AssertionError("called after what it was registered for")


@contextmanager
def as_before(model: Any) -> Iterator[None]:
    before = {
        id(config): (config, config._attn_implementation, config._experts_implementation) for config in _configs(model)
    }
    try:
        yield
    finally:
        for config, attention, experts in before.values():
            config._attn_implementation = attention
            config._experts_implementation = experts


def use_eager_experts(model: Any) -> None:
    """Make experts run eagerly, because transformers' default groups rows by expert."""
    for config in _configs(model):
        if config._experts_implementation is not None:
            config._experts_implementation = "eager"


def _configs(model: Any) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation"):
            yield config
