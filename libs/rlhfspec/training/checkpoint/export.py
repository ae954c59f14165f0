"""Export of the policy as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rlhfspec import job
from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.training.checkpoint.folders import open_checkpoint
from rlhfspec.training.checkpoint.shares import LEARNER
from rlhfspec.training.modeling.stored import StoredTensor
from rlhfspec.training.modeling.tensor_files import sync


def export_hf(
    folder: Path,
    state_dict: Mapping[str, torch.Tensor],
    config: Any,
    *,
    tokenizer: Any = None,
    generation_config: Any = None,
) -> Path:
    """Write configuration, weights and tokenizer to `folder`, replacing an earlier export.

    state_dict: weights under the names of `config`'s model, with LoRA merged.
    """
    writing = folder.with_name(f".writing-{folder.name}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        model = _model(state_dict, config)
        if generation_config is not None:
            model.generation_config = generation_config
        model.save_pretrained(writing)
        if tokenizer is not None:
            tokenizer.save_pretrained(writing)
        for path in writing.iterdir():
            sync(path)
        shutil.rmtree(folder, ignore_errors=True)
        writing.rename(folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise StorageError(folder, f"the export could not be written: {error}") from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    return folder


def policy_of(checkpoint: Path, model: job.Model) -> dict[str, torch.Tensor]:
    """Return a checkpoint's policy under Hugging Face names, with LoRA merged."""
    stored = open_checkpoint(checkpoint)[LEARNER]["policy"]
    weights = {name: each.whole() if isinstance(each, StoredTensor) else each for name, each in stored.items()}
    if model.lora is None:
        return weights
    from rlhfspec.training.modeling.loading import load_policy
    from rlhfspec.training.modeling.lora import merged_state

    policy = load_policy(model)
    with torch.no_grad():
        return merged_state(policy.state_dict() | weights, model.lora.alpha / model.lora.rank)


def export_checkpoint(checkpoint: Path, model: job.Model, folder: Path, *, tokenizer: Any) -> Path:
    """Export a checkpoint's policy to a Hugging Face folder."""
    from transformers import AutoConfig, GenerationConfig

    state = policy_of(checkpoint, model)
    try:
        generation_config = GenerationConfig.from_pretrained(model.path)
    except OSError:
        generation_config = None
    return export_hf(
        folder.absolute(),
        state,
        AutoConfig.from_pretrained(model.path),
        tokenizer=tokenizer,
        generation_config=generation_config,
    )


def _model(state_dict: Mapping[str, torch.Tensor], config: Any) -> Any:
    from transformers import AutoModelForCausalLM

    dtype = next(tensor.dtype for tensor in state_dict.values() if tensor.is_floating_point())
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    report = model.load_state_dict(dict(state_dict), assign=True, strict=False)
    model.tie_weights()
    absent = [name for name, tensor in model.named_parameters() if tensor.is_meta]  # tied weights may be absent
    if absent or report.unexpected_keys:
        problem = f"does not have the weights of the configuration: missing {absent}, unknown {report.unexpected_keys}"
        raise InvalidRequest("state_dict", len(state_dict), problem)
    return model
