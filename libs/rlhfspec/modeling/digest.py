"""One hash of all weights: equal digests mean equal bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch


def digest(state_dict: Mapping[str, torch.Tensor]) -> str:
    """sha256 over names in order, each with type, shape and bytes. Where a tensor lies and how does not matter.

    Example:
        >>> weights = {"a": torch.zeros(2, 3), "b": torch.ones(1)}
        >>> digest(weights) == digest({"b": torch.ones(1), "a": torch.zeros(3, 2).T})
        True
        >>> digest(weights) == digest({"a": torch.zeros(3, 2), "b": torch.ones(1)})
        False
    """
    total = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = state_dict[name].detach().contiguous().cpu()
        total.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0".encode())
        total.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()
