"""Where a job's models run on this machine."""

from __future__ import annotations

import torch

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import Spec


def device_of(spec: Spec) -> str:
    """auto: on a GPU if there is one, but for a job that is exactly on-policy: its arithmetic is the CPU kernels'."""
    if spec.device == "auto":
        return "cuda" if torch.cuda.is_available() and not spec.training.exact_on_policy else "cpu"
    if spec.device.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidRequest("spec.device", spec.device, "there is no CUDA GPU on this machine; take auto or cpu")
    return spec.device
