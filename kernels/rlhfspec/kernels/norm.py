"""Batch-invariant RMS norm on CPU, and its plain-torch reference."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.linear import checked, native_kernel


def rms_norm_twin(x: Tensor, weight: Tensor, eps: float, *, add_one: bool = False) -> Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return x * scale * (weight + 1 if add_one else weight)


def fused_rms_norm(x: Tensor, weight: Tensor, eps: float, *, add_one: bool = False) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension; `add_one`: * (1 + weight), as in Gemma."""
    if build.load() is None:
        return rms_norm_twin(x, weight, eps, add_one=add_one)
    width = weight.shape[0]
    x, weight = checked(x, width), checked(weight, width)
    out = torch.empty_like(x)
    native_kernel("rms_norm")(
        x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps, add_one, build.num_threads()
    )
    return out


class FusedRMSNorm(nn.Module):
    def __init__(self, weight: Tensor, eps: float, *, add_one: bool = False) -> None:
        super().__init__()
        self.eps = eps
        self.add_one = add_one
        self.load_weight(weight)

    def load_weight(self, weight: Tensor) -> None:
        self.weight = weight.detach().float().clone()

    def forward(self, x: Tensor) -> Tensor:
        return fused_rms_norm(x, self.weight, self.eps, add_one=self.add_one)
