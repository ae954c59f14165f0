"""Tiny random models of every class in transformers' causal-LM mapping, and their variants.

Configurations are shrunk by field name and by overrides per type. Variants change one thing: a window, a kind of RoPE,
a bias, an activation, a multiplier, a kind of layer.

Example:
    >>> config = tiny_config("mixtral")
    >>> config.num_local_experts, config.num_hidden_layers
    (6, 4)
    >>> [name for name, _ in variants("mistral")][:4]
    ['', 'sliding_window=24', 'sliding_window=7', 'rope=linear']
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, AutoModelForCausalLM

_LEAST_ENTROPY = 1.0  # nats; certain tokens have log-prob 0 whatever the model does
CLASSES_VOCAB_SIZE = 97  # prime: no code may rely on divisibility
_POSITIONS = 512
_SMALL: dict[str, Any] = {  # for configurations that have the field
    "vocab_size": CLASSES_VOCAB_SIZE, "text_vocab_size": CLASSES_VOCAB_SIZE, "max_position_embeddings": _POSITIONS,
    "n_positions": _POSITIONS, "n_ctx": _POSITIONS, "max_target_positions": _POSITIONS, "max_seq_len": _POSITIONS,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_size": 64, "n_embd": 64, "d_model": 64, "dim_model": 64, "word_embed_proj_dim": 64, "embedding_size": 64,
    "intermediate_size": 80, "ffn_dim": 80, "decoder_ffn_dim": 80, "encoder_ffn_dim": 80, "ffn_hidden_size": 80,
    "d_ff": 80, "dff": 80, "n_inner": 80, "feed_forward_size": 80, "dim_ff": 80,
    "num_hidden_layers": 4, "n_layer": 4, "num_layers": 4, "n_layers": 4, "decoder_layers": 4, "encoder_layers": 1,
    "num_attention_heads": 4, "n_head": 4, "num_heads": 4, "n_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rotary_dim": 8, "v_head_dim": 16,
    "moe_intermediate_size": 24, "expert_ffn_hidden_size": 24, "shared_expert_intermediate_size": 24,
    "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "moe_num_experts": 6, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "moe_top_k": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1,
    "q_lora_rank": 12, "kv_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "image_size": 16, "patch_size": 8, "num_channels": 3, "projection_dim": 32, "num_codebooks": 2,
    "hidden_size_global": 64,
}  # fmt: skip
_DECODER = {"is_decoder": True}
_HEADS = {"num_key_value_heads": 4}  # latent attention: every head has its own keys
_INDEX = {**_HEADS, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8}
_MIXED = ["sliding_attention", "full_attention"] * 2
_PER_LAYER = {"vocab_size_per_layer_input": CLASSES_VOCAB_SIZE, "hidden_size_per_layer_input": 8}


def _each(types: str, fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return dict.fromkeys(types.split(), fields)


_OF_TYPE: dict[str, dict[str, Any]] = {  # overrides by model type
    **_each("axk1 glm4_moe_lite minicpm3 youtu", _HEADS),
    **_each("deepseek_v2 deepseek_v3", {**_HEADS, "head_dim": 8}),
    **_each("axk2 deepseek_v32 glm_moe_dsa dots3_note_text", _INDEX),
    **_each("hunyuan_v1_dense hunyuan_v1_moe ministral nemotron", {"head_dim": 16}),
    **_each(
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl",
        _DECODER,
    ),
    "blt": {"encoder_hash_byte_group_vocab": 200},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta}
            for kind, theta in (("full_attention", 10000.0), ("sliding_attention", 500.0))
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 2},
    },
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 4, "adapter_in_dim": 64, "adapter_out_dim": 64},
    "falcon": {"num_kv_heads": 2},
    "gemma3n_text": {
        **_PER_LAYER, "layer_types": _MIXED, "num_kv_shared_layers": 0, "laurel_rank": 8,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {**_PER_LAYER, "layer_types": _MIXED},
    "gemma4_unified_text": {**_PER_LAYER, "layer_types": _MIXED},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 24},
    "granite_swa": {"layer_types": _MIXED},
    "granitemoe_swa": {"layer_types": _MIXED},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {**_HEADS, "zero_expert_num": 2, "head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "expand": 2},
    "qwen4_exp_text": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 2, "ple_embed_dim": 16, "ngram_vocab_size_base": 200, "split_ngram_parts": 2,
    },
    "reformer": {**_DECODER, "axial_pos_embds_dim": [16, 48], "axial_pos_shape": [16, 32]},
    "xlm": {"n_words": CLASSES_VOCAB_SIZE, "emb_dim": 64},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
_ACTIVATION_FIELDS = ("hidden_act", "hidden_activation", "activation_function", "activation", "ffn_act_fn")
_ACTIVATIONS = (
    "silu", "relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_10", "gelu_accurate", "gelu_python",
    "quick_gelu", "relu2", "relu6", "leaky_relu", "mish", "laplace", "sigmoid", "tanh", "hardswish", "linear",
)  # fmt: skip
_TYPES_WITH_EVERY_ACTIVATION = ("gpt2", "llama", "mixtral", "phi")  # other types only run those without kernels
_RARE_ACTIVATIONS = ("gelu_10", "quick_gelu", "relu6")
_ROPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 256},
    "longrope, beyond": {"factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip
_SWITCHES = (  # boolean fields; each is inverted
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_bias", "qkv_bias", "use_qkv_bias", "attention_out_bias",
    "norm_topk_prob", "scale_embedding", "rope_interleave", "use_qk_norm", "qk_layernorm", "multi_query",
    "use_parallel_residual", "parallel_attn", "new_decoder_architecture", "alibi", "bias", "lm_head_bias",
    "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "scale_attn_weights", "attn_temperature_tuning",
    "do_layer_norm_before", "_remove_final_layer_norm", "enable_bias", "layer_norm_elementwise_affine", "norm_bias",
    "decoder_bias", "use_post_norm", "mup_enabled", "use_bidirectional_attention", "is_decoder", "gating",
    "moe_apply_router_weight_on_input", "enable_moe_fp32_combine", "attention_k_eq_v", "use_double_wide_mlp",
    "enable_moe_block", "prefix_lm", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "is_moe",
    "use_expert_bias", "use_shared_attention_adapter", "use_mem_rope", "sinusoidal_embeddings", "causal",
)  # fmt: skip
_NUMBERS: dict[str, Any] = {  # fields set to another value
    "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "moe_router_logit_softcapping": 0.7,
    "embedding_multiplier": 0.6, "residual_multiplier": 0.4, "attention_multiplier": 0.11, "logits_scaling": 1.7,
    "logit_scale": 0.3, "routed_scaling_factor": 2.5, "router_scaling_factor": 2.5, "route_scale": 1.7,
    "swiglu_limit": 0.2, "swiglu_alpha": 0.9, "clip_qkv": 0.3, "attention_value_scale": 0.4, "scale_depth": 0.7,
    "query_pre_attn_scalar": 23, "embedding_scale": 0.3, "attn_scale": 0.5, "floor_scale": 16,
    "attention_chunk_size": 24, "num_key_value_heads": 1, "num_kv_heads": 1, "num_experts_per_tok": 1,
    "no_rope_layer_interval": 2, "mlp_only_layers": [1], "decoder_sparse_step": 2, "moe_layer_freq": 2,
    "n_inner": None, "lambda_std_dev": 0.5,
}  # fmt: skip


def model_types() -> list[str]:
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Return a tiny configuration, with `changes` applied to the decoder's part."""
    kind = CONFIG_MAPPING[model_type]
    parts = _parts(kind)
    text = next((name for name in ("text_config", "decoder", "decoder_config") if name in parts), None)
    small = {name: tiny_config(part, **(changes if name == text else {})) for name, part in parts.items()}
    return _small(kind, small | _OF_TYPE.get(model_type, {}) | ({} if text else changes))


def _parts(kind: Any) -> dict[str, str]:
    """Return the model types of a configuration class's sub-configurations, by field name."""
    parts = getattr(kind, "sub_configs_defaults", {})
    types = {name: part.model_type or getattr(part.config_class, "model_type", "") for name, part in parts.items()}
    return {name: part for name, part in types.items() if part in CONFIG_MAPPING}


def _small(kind: Any, wanted: dict[str, Any]) -> PreTrainedConfig:
    usual = _fields(kind)
    small = {name: value for name, value in _SMALL.items() if name in usual}
    return kind(**copy.deepcopy(small | wanted))  # type: ignore[no-any-return]


def _fields(kind: Any) -> dict[str, Any]:
    annotated = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    aliases = getattr(kind, "attribute_map", {})
    return {name: getattr(kind, name, None) for name in annotated if aliases.get(name) not in annotated}


def tiny_model(config: PreTrainedConfig, *, seed: int = 0) -> Any:
    """Return a float32 model in evaluation mode in which every part affects the logits."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        copy.deepcopy(config), dtype=torch.float32, attn_implementation="eager"
    )
    return stirred(model, vocab_size=CLASSES_VOCAB_SIZE)


@torch.no_grad()
def stirred(model: Any, *, vocab_size: int, logit_scale: float = 3.0) -> Any:
    """Enlarge and randomize all weights: fresh ones give nearly uniform distributions, which hide mistakes."""
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim == 1:  # norms and biases begin as ones and zeros; no test should rely on that
            parameter.add_(0.1 * torch.randn(parameter.shape))
        else:
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            parameter.copy_(torch.randn(parameter.shape) * 0.1 if spread == 0.0 else parameter * (0.1 / spread))
            parameter.masked_fill_((parameter == 0).all(-1, keepdim=True), 0.1)  # a padding token's embedding
    head = model.get_output_embeddings()
    if getattr(head, "weight", None) is not None:
        tokens = torch.arange(64).reshape(2, 32) % (vocab_size - 3) + 3
        head.weight.mul_(logit_scale / model(input_ids=tokens, use_cache=False).logits.std())
        while _entropy(model, tokens) < _LEAST_ENTROPY:  # a tied head favours the last token
            head.weight.mul_(0.7)
    return model


def _entropy(model: Any, tokens: torch.Tensor) -> float:
    """Return the median entropy over the tokens, in nats."""
    log_probs = model(input_ids=tokens, use_cache=False).logits.float().log_softmax(-1)
    return float(-(log_probs.exp() * log_probs).sum(-1).median())


def variants(model_type: str) -> Iterator[tuple[str, Callable[[], PreTrainedConfig]]]:
    """Yield (variant's name, function that makes its configuration), first the plain one with an empty name."""
    plain = _decoder_of(tiny_config(model_type))
    yield "", lambda: tiny_config(model_type)
    activations = _ACTIVATIONS if model_type in _TYPES_WITH_EVERY_ACTIVATION else _RARE_ACTIVATIONS
    for name, changes in _changes(plain, activations):
        yield name, partial(tiny_config, model_type, **changes)


def _decoder_of(config: PreTrainedConfig) -> Any:
    return config.get_text_config(decoder=True)


def _changes(plain: Any, activations: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    fields = plain.to_dict()
    yield from _windows(fields)
    yield from ((f"rope={kind}", {"rope_parameters": rope}) for kind, rope in _ropes(fields))
    for name in _SWITCHES:
        if isinstance(fields.get(name), bool):
            yield f"{name}={not fields[name]}", {name: not fields[name]}
    for name, value in _NUMBERS.items():
        if name in fields and fields[name] != value and (value is not None or fields[name] is not None):
            yield f"{name}={value}", {name: value}
    for name in _ACTIVATION_FIELDS:
        if isinstance(fields.get(name), str):
            yield from ((f"{name}={kind}", {name: kind}) for kind in activations if kind != fields[name])


def _windows(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, changed fields) with windows in every layer, and in every second one if layers have types."""
    if "sliding_window" not in fields:
        return
    extra = {"use_sliding_window": True, "max_window_layers": 1} if "use_sliding_window" in fields else {}
    for window in (24, 7):
        yield f"sliding_window={window}", {"sliding_window": window, **extra}
    if "layer_types" in fields:
        mixed = ["sliding_attention", "full_attention"] * 2
        yield "sliding_window=24, every second layer", {"sliding_window": 24, **extra, "layer_types": mixed}


def _ropes(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    plain = fields.get("rope_parameters")
    if not plain:
        return
    for kind, parameters in _ROPES.items():
        yield kind, _with_rope(plain, kind, parameters, fields)
    yield "partial", _with_rope(plain, "default", {"partial_rotary_factor": 0.5}, fields)
    yield "theta", _with_rope(plain, "default", {"rope_theta": 177.0}, fields)


def _with_rope(plain: dict[str, Any], kind: str, parameters: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the RoPE parameters `plain` converted to `kind`, once per layer type if they are given per layer type."""
    if any(isinstance(value, dict) for value in plain.values()):
        return {
            name: _with_rope(value, kind, parameters, fields) if isinstance(value, dict) else value
            for name, value in plain.items()
        }
    kept = {name: value for name, value in plain.items() if name in ("rope_theta", "partial_rotary_factor")}
    changed = {**kept, "rope_type": kind.partition(",")[0], **parameters}
    if changed["rope_type"] == "longrope":
        head_dim = fields.get("qk_rope_head_dim") or fields.get("head_dim") or 16
        pairs = int(head_dim * changed.get("partial_rotary_factor", 1.0)) // 2
        changed |= {
            "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
            "long_factor": [2.0 + i for i in range(pairs)],
        }
    return changed
