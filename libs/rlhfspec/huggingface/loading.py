"""From a folder or a hub id to a Hugging Face model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.trace import FORWARD_ERRORS, first_line

_LOAD_ERRORS = (*FORWARD_ERRORS, OSError, ImportError)


def load_model(path: str | Path, *, field: str = "path") -> Any:
    """The Hugging Face causal LM at `path` (a local folder or a hub id), in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    except _LOAD_ERRORS as error:
        if isinstance(error, InvalidRequest):
            raise
        exists = Path(path).exists()
        reason = "not a loadable Hugging Face causal LM" if exists else "no such folder, nor a model to be had"
        raise InvalidRequest(field, str(path), f"{reason}: {first_line(error)}") from error
    return model.eval()  # type: ignore[no-untyped-call]
