"""Hugging Face `generate` as a baseline: SDPA attention, static batches, sampling without top-k and top-p."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlhfspec.bench.rivals.serve import serve

_model: Any = None


def load(arguments: dict[str, Any]) -> dict[str, Any]:
    global _model
    torch.set_num_threads(arguments["num_threads"])
    _model = AutoModelForCausalLM.from_pretrained(arguments["target"], dtype=getattr(torch, arguments["dtype"]))
    _model.eval()
    return {"loaded": {}}


def run(arguments: dict[str, Any]) -> dict[str, Any]:
    """Run a static batch until its longest sequence is done; tokens beyond a sequence's own limit do not count."""
    prompts, max_tokens = arguments["prompts"], arguments["max_tokens"]
    width = max(len(prompt) for prompt in prompts)
    pad = _model.config.pad_token_id
    token_ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])  # [batch, width]
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    torch.manual_seed(arguments["seeds"][0])
    began = time.perf_counter()
    with torch.inference_mode():
        _model.generate(
            input_ids=token_ids,
            attention_mask=mask,
            do_sample=True,
            temperature=arguments.get("temperature", 1.0),
            top_k=0,
            top_p=1.0,
            min_new_tokens=max(max_tokens),
            max_new_tokens=max(max_tokens),
            pad_token_id=pad,
        )
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "num_tokens": sum(max_tokens), "accepted_per_verification": 0.0}


if __name__ == "__main__":
    serve({"load": load, "run": run})
