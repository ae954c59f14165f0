"""Device and settings of a job's models on this machine."""

from __future__ import annotations

import logging
import os
from typing import Any

import torch

from rlhfspec.common.ranks import local_rank
from rlhfspec.errors import InvalidRequest
from rlhfspec.job import Spec

log = logging.getLogger(__name__)
_USUAL_CAP = 2.0  # of truncated importance sampling


def device_of(spec: Spec) -> str:
    """Return this rank's device; `auto` is a GPU if there is one, but the CPU with `exactOnPolicy`."""
    if spec.device == "auto":
        device = "cuda" if torch.cuda.is_available() and not spec.training.exact_on_policy else "cpu"
    elif spec.device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidRequest("spec.device", spec.device, "there is no CUDA GPU on this machine; take auto or cpu")
    else:
        device = spec.device
    rank = local_rank(os.environ)
    if rank is None or device == "cpu":
        return device
    if device != "cuda":
        raise InvalidRequest("spec.device", device, "names one GPU for several ranks; use cuda to give each its own")
    count = torch.cuda.device_count()
    if 1 < count <= rank:
        raise InvalidRequest("LOCAL_RANK", rank, f"there are only {count} GPUs; start at most one rank per GPU")
    return f"cuda:{rank}" if count > 1 else "cuda:0"


def settled(spec: Spec, device: str) -> Spec:
    """Return the job with `auto` types resolved: float32 on a CPU, else bfloat16 generation and autocast.

    Importance weights are capped at 2 by default if generator and trainer differ in precision.
    """
    on_cpu = device.startswith("cpu") or spec.training.exact_on_policy
    generates = "float32" if on_cpu else "bfloat16"
    trains = "off" if on_cpu or spec.model.dtype != "auto" else "bfloat16"
    generation, model, training = spec.generation, spec.model, spec.training
    found = {
        "generation": _with(generation, "dtype", generates),
        "model": _with(model, "dtype", "float32"),
        "training": _with(training, "autocast", trains),
    }
    if not on_cpu:
        _say_what_is_slow(spec)
    computes = "bfloat16" if found["training"].autocast == "bfloat16" else found["model"].dtype
    differs = found["generation"].dtype != computes and not spec.training.exact_on_policy
    cap = spec.algorithm.importance_cap
    cap = (_USUAL_CAP if differs else None) if cap is None else cap or None
    found["algorithm"] = spec.algorithm.model_copy(update={"importance_cap": cap})
    return spec.model_copy(update=found)


def _with(block: Any, name: str, value: str) -> Any:
    return block.model_copy(update={name: value}) if getattr(block, name) == "auto" else block


def _say_what_is_slow(spec: Spec) -> None:
    slow = []
    if spec.generation.dtype == "float32":
        slow.append("generation.dtype")
    if spec.model.dtype == "float32" and spec.training.autocast != "bfloat16":
        slow.append("model.dtype")
    for field in slow:
        log.warning("%s: float32 does not use a GPU's fast matrix units; auto chooses bfloat16 on a GPU", field)


def name_of(device: torch.device) -> str:
    """Return the product name of a GPU, or another device's type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
