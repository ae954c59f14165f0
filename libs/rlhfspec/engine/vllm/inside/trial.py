"""What is generated at load, before any sequence of the user's, and what Hugging Face says of its logits."""

from __future__ import annotations

from typing import Any

import torch

_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
TRIAL: tuple[dict[str, Any], ...] = tuple(
    {
        "prompt": _PROMPT,
        "max_tokens": 4,
        "stop_token_ids": [],
        "law": {"seed": 7, "temperature": temperature, "top_k": top_k, "top_p": top_p, "num_prompt": len(_PROMPT)},
    }
    for temperature, top_k, top_p in ((0.8, 0, 1.0), (2.0, 50, 0.9))
)


def difference_to_hugging_face(model: str, dtype: str, logits: list[float]) -> float:
    """The largest difference of the logits after the trial's prompt, in parts of the largest logit."""
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        theirs: Any = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))
        expected = theirs(input_ids=torch.tensor([_PROMPT]), use_cache=False).logits[0, -1].float()
    ours = torch.tensor(logits)[: len(expected)]
    return float((ours - expected).abs().max() / expected.abs().max())
