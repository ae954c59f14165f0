"""Which models the engine runs, decided by name before anything runs and by proof afterwards.

A feature that would make tokens depend on more than the row's own prefix, or that our attention does not carry,
is refused with an error that names it; nothing is ever silently ignored.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlhfspec.errors import InvalidRequest, UnsupportedModel

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
_LAYER_TYPES = ("full_attention", "sliding_attention")
_SELF_CHECK_TOLERANCE = 2e-3  # relative to the largest logit; a dropped feature is off by far more


def load_model(path: str | Path, *, field: str = "path") -> Any:
    """The Hugging Face causal LM at `path` (a local folder or a hub id), in float32 on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path)
        check_config(config, str(path))
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidRequest):
            raise
        reason = (
            "not a loadable Hugging Face causal LM" if Path(path).exists() else "no such folder, nor a model to be had"
        )
        problem = f"{reason}: {_first_line(error)}"
        raise InvalidRequest(field, str(path), problem) from error
    return model.eval()  # type: ignore[no-untyped-call]


def check_config(config: Any, name: str) -> None:
    """Refuse by name what the configuration already shows."""
    rope = _rope_types(config)
    layer_types = [kind for kind in (getattr(config, "layer_types", None) or []) if kind not in _LAYER_TYPES]
    refused = (
        (getattr(config, "is_encoder_decoder", False), "encoder-decoder attention"),
        (getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"), "ALiBi position bias"),
        (any(kind in _LENGTH_DEPENDENT_ROPE for kind in rope), f"length-dependent RoPE scaling {sorted(rope)}"),
        (getattr(config, "attention_chunk_size", None), "chunked attention (attention_chunk_size)"),
        (getattr(config, "num_kv_shared_layers", 0), "KV shared between layers (num_kv_shared_layers)"),
        (getattr(config, "kv_lora_rank", None), "multi-head latent attention (kv_lora_rank)"),
        (layer_types, f"layer types {sorted(set(layer_types))}"),
        (not getattr(config, "num_attention_heads", None), "a model without attention heads"),
        (getattr(config, "position_embedding_type", "absolute") not in ("absolute", "rotary"), "relative positions"),
    )
    for present, feature in refused:
        if present:
            raise UnsupportedModel("model", name, f"uses an attention feature the engine refuses: {feature}")


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    return {str(entry.get("rope_type", entry.get("type", "default"))) for entry in nested}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


class ShapeRecorder:
    """Stands in for attention once, to learn every layer's key/value shape from the model itself."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}  # layer -> (kv heads, head dim)

    def __call__(self, module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise UnsupportedModel("model", type(module).__name__, "attention modules carry no layer_idx")
        if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
            raise UnsupportedModel("model", type(module).__name__, "keys and values of different head sizes")
        self.shapes[layer] = (int(key.shape[1]), int(key.shape[3]))
        return query.transpose(1, 2).contiguous(), None

    def uniform(self, num_layers: int, name: str) -> tuple[int, int]:
        if sorted(self.shapes) != list(range(num_layers)):
            raise UnsupportedModel(
                "model", name, f"only layers {sorted(self.shapes)} of {num_layers} route through AttentionInterface"
            )
        if len(set(self.shapes.values())) != 1:
            raise UnsupportedModel("model", name, "layers with different key/value shapes")
        return self.shapes[0]


@torch.inference_mode()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """What plain Hugging Face says, before anything is swapped. Returns [len(tokens), vocab]."""
    model.set_attn_implementation("eager")
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()  # type: ignore[no-any-return]


def compare_self_check(ours: torch.Tensor, theirs: torch.Tensor, *, name: str, exact: bool) -> None:
    """The last guard: whatever the configuration did not show, the numbers do."""
    tolerance = _SELF_CHECK_TOLERANCE if exact else 0.1  # bf16 arithmetic rounds, a dropped feature is far larger
    if not (torch.isfinite(theirs).all() and torch.isfinite(ours).all()):
        return  # broken weights are reported sequence by sequence, when they are used
    difference = (ours - theirs).abs().max().item() / max(theirs.abs().max().item(), 1e-6)
    if difference > tolerance:
        raise UnsupportedModel(
            "model", name, f"the engine's logits differ from Hugging Face's by {difference:.1e} of their size;"
            " an attention feature of this model does not pass through AttentionInterface",
        )  # fmt: skip
