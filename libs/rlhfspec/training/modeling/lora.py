"""LoRA through peft. Engine and exports get merged weights; checkpoints hold only adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlhfspec import job
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.structure.causal_lm import anatomy_of

_ADAPTER = "default"


def add_lora(model: Any, lora: job.Lora, *, seed: int) -> None:
    """Add seeded adapters in place, which leave the output unchanged at first."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # used as a factor only
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, _ADAPTER)
        except ValueError as error:
            problem = f"no layer of {type(model).__name__} can take the LoRA update: {str(error).splitlines()[0]}"
            raise InvalidRequest("spec.model.lora.targetModules", lora.target_modules, problem) from error
    _check_targets(model, lora)
    model.eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def _check_targets(model: Any, lora: job.Lora) -> None:
    called = anatomy_of(model).called
    for name, module in model.named_modules():
        if not hasattr(module, "base_layer"):
            continue
        problem = ""
        if not hasattr(module.base_layer, "weight"):
            problem = f"{name} holds many matrices (experts), which LoRA does not support here: name other layers"
        elif name not in called and name.rpartition(".")[0] in called:
            problem = f"{name} is never called: other code reads its weight, without the update; name other layers"
        if problem:
            raise InvalidRequest("spec.model.lora.targetModules", lora.target_modules, problem)


def adapters(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state_dict.items() if is_adapter(name)}


def set_dropout(model: torch.nn.Module, on: bool) -> None:
    """Set the adapters' dropout. The model's own stays off."""
    for name, module in model.named_modules():
        if ".lora_dropout." in name:
            module.train(on)


def merged_state(state_dict: Mapping[str, torch.Tensor], scaling: float) -> dict[str, torch.Tensor]:
    """Return all weights under plain names, with base + scaling * B A merged."""
    merged: dict[str, torch.Tensor] = {}
    for name, tensor in state_dict.items():
        if is_adapter(name):
            continue
        layer, base, rest = name.rpartition(".base_layer")
        low = state_dict.get(f"{layer}.lora_A.{_ADAPTER}.weight") if rest == ".weight" else None
        if low is not None:  # low [rank, in], high [out, rank]
            high = state_dict[f"{layer}.lora_B.{_ADAPTER}.weight"]
            tensor = tensor + (scaling * (high.float() @ low.float())).to(tensor.dtype)
        merged[f"{layer}{rest}" if base else name] = tensor
    return merged


def is_adapter(name: str) -> bool:
    return ".lora_" in name
