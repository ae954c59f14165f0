"""vLLM as a baseline: plain, or with drafts. Run by the Python that has vLLM.

A fair and correct comparison needs:
- one process, so that an idle vLLM does not poll; threads bound by VLLM_CPU_OMP_THREADS_BIND;
- on a CPU, eager mode (compilation takes longer than the benchmark and gains nothing); token ids in and out;
- patched speculative sampling: `expand_batch_to_tokens` never copies results back from the native kernel when dtypes
  differ, so temperatures of drafted tokens are uninitialized memory.
"""

from __future__ import annotations

import os
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

_engine: Any = None


def load(arguments: dict[str, Any]) -> dict[str, Any]:
    global _engine
    import vllm
    from vllm.platforms import current_platform

    options: dict[str, Any] = {}
    if drafting := arguments.get("drafting"):
        _mend_speculative_sampling()
        options["speculative_config"] = {
            "method": drafting,
            "num_speculative_tokens": arguments["num_draft_tokens"],
        } | ({"prompt_lookup_max": 4} if drafting == "ngram" else {"model": arguments["draft"]})
    _engine = vllm.LLM(
        model=arguments["target"],
        dtype=arguments["dtype"],
        max_model_len=arguments["max_context"],
        max_num_seqs=arguments["max_sequences"],
        enforce_eager=current_platform.is_cpu(),
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **options,
    )
    return {"loaded": {"version": vllm.__version__}}


def run(arguments: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=arguments.get("temperature", 1.0), max_tokens=length, ignore_eos=True, detokenize=False
        )
        for length in arguments["max_tokens"]
    ]
    prompts = [{"prompt_token_ids": prompt} for prompt in arguments["prompts"]]
    before = _speculation_counts()
    began = time.perf_counter()
    outputs = _engine.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    num_drafts, num_accepted = (now - then for now, then in zip(_speculation_counts(), before, strict=True))
    return {
        "seconds": seconds,
        "num_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "accepted_per_verification": num_accepted / num_drafts if num_drafts else 0.0,
    }


def _speculation_counts() -> tuple[float, float]:
    """Return the numbers of drafts and of accepted draft tokens since the start."""
    values = {metric.name: getattr(metric, "value", 0.0) for metric in _engine.get_metrics()}
    return values.get("vllm:spec_decode_num_drafts", 0.0), values.get("vllm:spec_decode_num_accepted_tokens", 0.0)


def _mend_speculative_sampling() -> None:
    import torch
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: torch.Tensor,  # [batch]
        cu_num_tokens: torch.Tensor,  # [batch]
        num_tokens: int,
        replace_from: int = 0,
        replace_to: int = 0,
    ) -> torch.Tensor:
        counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
        values = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
        expanded = torch.repeat_interleave(values, counts.to(torch.int64))  # [num_tokens]
        assert len(expanded) == num_tokens
        return expanded

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


if __name__ == "__main__":
    from serve import serve  # type: ignore[import-not-found]  # beside this file, found by the path of a script

    serve({"load": load, "run": run})
