"""Where a job's models run on this machine."""

from __future__ import annotations

import os

import torch

from rlhfspec.common.ranks import local_rank
from rlhfspec.errors import InvalidRequest
from rlhfspec.job import Spec


def device_of(spec: Spec) -> str:
    """auto: on a GPU if there is one, but for a job that is exactly on-policy: its arithmetic is the CPU kernels'.

    Of several ranks each has the GPU of its LOCAL_RANK, or the only one that it can see.
    """
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
        raise InvalidRequest("spec.device", device, "is one GPU for several ranks; take cuda, and each has its own")
    count = torch.cuda.device_count()
    if 1 < count <= rank:
        raise InvalidRequest("LOCAL_RANK", rank, f"there are {count} GPUs for more ranks; start as many as there are")
    return f"cuda:{rank}" if count > 1 else "cuda:0"
