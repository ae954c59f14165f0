"""Choice of the native decoder for known model classes. Callers must compare its bits with the layers'."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlhfspec.huggingface.fused.rotary import RotaryTable
from rlhfspec.huggingface.structure.causal_lm import CausalLM
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.decoder import DecoderParts, NativeDecoder
from rlhfspec.kernels.linear import PackedGatedMLP, PackedLinear
from rlhfspec.kernels.norm import FusedRMSNorm

# the decoder computes exactly: norm, q/k/v (and norms of q and k), rotary by halves, attention, o, residual, norm,
# gated MLP, residual
_FAMILIES = ("llama.modeling_llama.Llama", "mistral.modeling_mistral.Mistral", "qwen2.modeling_qwen2.Qwen2",
             "qwen3.modeling_qwen3.Qwen3", "seed_oss.modeling_seed_oss.SeedOss")  # fmt: skip
_LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_ATTENTION_NORMS = {"q_norm", "k_norm"}


def native_decoder(
    parts: CausalLM, kv: torch.Tensor, dtype: torch.dtype, split: int, taps: tuple[int, ...] = ()
) -> NativeDecoder | None:
    """Return the model's native decoder over the cache `kv`, or None if it cannot run this model."""
    trunk, specs, head = parts.trunk, parts.anatomy.attentions, _plain_head(parts.model)
    if build.load() is None or not _is_known(trunk) or head is None:
        return None
    if len(specs) != len(trunk.layers) or len({(s.scale, s.softcap, s.has_sinks, s.chunk) for s in specs}) != 1:
        return None
    first = specs[0]
    if (
        first.softcap
        or first.has_sinks
        or first.chunk
        or first.key_dim != kv.shape[-1]
        or first.value_dim != kv.shape[-1]
    ):
        return None
    tables = trunk.rotary_emb.tables(dtype) if isinstance(trunk.rotary_emb, RotaryTable) else None
    if tables is None or tables[0].shape[-1] != kv.shape[-1]:
        return None
    windows = [spec.window or 0 for spec in specs]
    decoder = DecoderParts(trunk, head, first.scale, windows, split, taps)
    return NativeDecoder(decoder, kv, tables[0], tables[1], first.num_heads)


def _plain_head(model: Any) -> PackedLinear | None:
    family = _class_of(model).removesuffix("ForCausalLM")
    head = model.lm_head if family in _FAMILIES else getattr(model, "only_head", None)
    return head if isinstance(head, PackedLinear) else None


def _is_known(trunk: Any) -> bool:
    family = _class_of(trunk).removesuffix("Model")
    return (
        family in _FAMILIES
        and type(trunk.embed_tokens) is nn.Embedding
        and isinstance(trunk.norm, FusedRMSNorm)
        and all(_is_known_layer(layer, family) for layer in trunk.layers)
    )


def _is_known_layer(layer: Any, family: str) -> bool:
    attention = layer.self_attn
    parts = _children(attention)
    linears = [getattr(attention, name, None) for name in sorted(_ATTENTION_PARTS)]
    norms = [getattr(attention, name) for name in sorted(parts & _ATTENTION_NORMS)]
    norms += [layer.input_layernorm, layer.post_attention_layernorm]
    return (
        _class_of(layer) == f"{family}DecoderLayer"
        and _class_of(attention) == f"{family}Attention"
        and _children(layer) == _LAYER_PARTS
        and parts in (_ATTENTION_PARTS, _ATTENTION_PARTS | _ATTENTION_NORMS)
        and isinstance(layer.mlp, PackedGatedMLP)
        and all(isinstance(part, PackedLinear) for part in linears)
        and all(isinstance(norm, FusedRMSNorm) for norm in norms)
    )


def _class_of(module: Any) -> str:
    """Return the module's class as a dotted path below transformers.models."""
    return f"{type(module).__module__}.{type(module).__qualname__}".removeprefix("transformers.models.")


def _children(module: Any) -> set[str]:
    return {name for name, _ in module.named_children()}
