"""vLLM arguments that `generation.engine.arguments` accepts, and why others are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhfspec.errors import did_you_mean

PYTHON, NUM_DRAFT_TOKENS, BATCH_INVARIANT = "python", "num_draft_tokens", "batch_invariant"
_OURS: Mapping[str, type] = {PYTHON: str, NUM_DRAFT_TOKENS: int, BATCH_INVARIANT: bool}
_TAKEN = frozenset({
    "attention_backend", "block_size", "cpu_offload_gb", "disable_cascade_attn", "disable_custom_all_reduce",
    "distributed_executor_backend", "enable_chunked_prefill", "enable_expert_parallel", "enable_prefix_caching",
    "enforce_eager", "hf_overrides", "kv_cache_dtype", "kv_cache_memory_bytes", "linear_backend", "load_format",
    "long_prefill_token_threshold", "max_num_batched_tokens", "max_parallel_loading_workers", "model_impl",
    "moe_backend", "optimization_level", "quantization", "quantization_config", "revision", "trust_remote_code",
})  # fmt: skip
_FIELDS = {
    "model": "model.path", "tokenizer": "model.tokenizer", "dtype": "generation.dtype",
    "max_model_len": "dataset.maxPromptTokens and generation.maxTokens", "max_num_seqs": "generation.maxSequences",
    "num_gpu_blocks_override": "generation.kvCacheTokens", "tensor_parallel_size": "roles.generator.tensorParallel",
    "gpu_memory_utilization": "generation.gpuMemoryFraction", "seed": "training.seed",
    "speculative_config": "generation.speculation.mode", "spec_method": "generation.speculation.mode",
    "spec_model": "model.drafter", "spec_tokens": "generation.engine.arguments.num_draft_tokens",
}  # fmt: skip
_BREAKS = {
    **dict.fromkeys(
        ("logits_processors", "logprobs_mode", "generation_config", "override_generation_config", "watermark_config",
         "enable_batch_sharded_sampling", "diffusion_config", "max_logprobs", "structured_outputs_config"),
        "it would change how tokens are sampled",
    ),
    **dict.fromkeys(
        ("async_scheduling", "stream_interval", "scheduler_cls", "pipeline_parallel_size", "data_parallel_size"),
        "tokens would be returned later, when the weights may have changed",
    ),
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size", "prefix_cache_retention_interval", "kv_sharing_fast_prefill"),
        "it would keep KV that older weights computed",
    ),
    **dict.fromkeys(
        ("enable_lora", "weight_transfer_config", "enable_sleep_mode"), "the trainer sends full weights"
    ),
    **dict.fromkeys(("worker_cls", "worker_extension_cls", "additional_config"), "this project sets its own"),
}  # fmt: skip


def problem_of(name: str, arguments: Mapping[str, Any]) -> str | None:
    if name in _OURS:
        value, kind = arguments[name], _OURS[name]
        is_right = type(value) is kind and not (isinstance(value, int) and name == NUM_DRAFT_TOKENS and value < 1)
        return None if is_right else _MUST_BE[kind]
    if name in _TAKEN:
        return None
    if name in _FIELDS:
        return f"is set by {_FIELDS[name]}: remove it"
    if name in _BREAKS:
        return f"is not supported: {_BREAKS[name]}; remove it"
    return f"is not an argument of this engine{did_you_mean(name, {*_OURS, *_TAKEN, *_FIELDS})}"


_MUST_BE = {str: "must be text", int: "must be a whole number >= 1", bool: "must be true or false"}
