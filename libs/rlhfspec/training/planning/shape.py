"""Model sizes from a configuration, by building the model on torch's meta device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rlhfspec.errors import InvalidRequest, first_line
from rlhfspec.huggingface.loading import LOAD_ERRORS
from rlhfspec.huggingface.structure.layers import layers_of, num_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    kind: str  # the class
    num_parameters: int
    num_layers: int
    block_parameters: int  # of the largest layer
    linear_widths: tuple[tuple[str, int], ...]  # of the layers' linear modules: name, inputs and outputs together
    hidden: int
    num_norms: int  # of a layer, over the width of the model
    normed_width: int  # of queries and keys, where they are normed too
    inner: int  # of the MLP; in a mixture, of all active experts
    num_heads: int
    query_width: int  # heads x their size
    kv_width: int  # keys and values of a token in a layer: 2 x heads x their size
    vocab_size: int

    @property
    def root_parameters(self) -> int:
        return self.num_parameters - self.num_layers * self.block_parameters

    @property
    def head_parameters(self) -> int:
        return self.vocab_size * self.hidden

    def part(self, count: int) -> ModelShape:
        """Return the shape of one of `count` tensor parallel parts."""
        cut = ("num_parameters", "block_parameters", "normed_width", "inner", "num_heads", "query_width", "kv_width")
        parts = {name: getattr(self, name) // count for name in (*cut, "vocab_size")}
        return replace(self, **parts)

    def lora_parameters(self, rank: int, targets: Sequence[str] | str) -> int:
        every = targets == "all-linear"
        return sum(rank * width for name, width in self.linear_widths if every or name in targets)


def shape_at(path: str, *, field: str) -> ModelShape:
    """Return a model's shape from the configuration at a folder or hub id."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path)
    except LOAD_ERRORS as error:
        raise InvalidRequest(field, path, f"its config.json cannot be read: {first_line(error)}") from error
    return shape_of(config, name=field)


def shape_of(config: Any, *, name: str) -> ModelShape:
    from transformers import AutoModelForCausalLM

    maker: Any = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            model = maker.from_config(config)
    except LOAD_ERRORS as error:
        raise InvalidRequest(name, type(config).__name__, f"is not a causal LM: {first_line(error)}") from error
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    layers = layers_of(model)
    norms = [path for path, each in layers[0].named_modules() if _is_norm(each)]
    of_heads = [path for path in norms if path.endswith(("q_norm", "k_norm"))]
    linear = [
        (path.rpartition(".")[2], each.in_features + each.out_features)
        for layer in layers
        for path, each in layer.named_modules()
        if isinstance(each, nn.Linear)
    ]
    return ModelShape(
        kind=type(model).__name__,
        num_parameters=num_weights(model),
        num_layers=len(layers),
        block_parameters=max(map(num_weights, layers)),
        linear_widths=tuple(linear),
        hidden=text.hidden_size,
        num_norms=len(norms) - len(of_heads),
        normed_width=(heads + kv_heads) * size if of_heads else 0,
        inner=_inner(text),
        num_heads=heads,
        query_width=heads * size,
        kv_width=2 * kv_heads * size,
        vocab_size=text.vocab_size,
    )


def _is_norm(module: nn.Module) -> bool:
    own = list(module.parameters())
    return not list(module.children()) and bool(own) and all(each.ndim == 1 for each in own)


def _inner(config: Any) -> int:
    wide = getattr(config, "moe_intermediate_size", None) or getattr(config, "intermediate_size", None)
    wide = int(wide or 4 * config.hidden_size)
    experts = getattr(config, "num_experts_per_tok", None) or 1
    return wide * (int(experts) + int(getattr(config, "n_shared_experts", None) or 0))
