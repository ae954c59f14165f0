"""Muon optimizer in float32 on a CPU, where `torch.optim.Muon` in bfloat16 is slow."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_LEAST_NORM = 1e-7


class Muon(torch.optim.Optimizer):
    """Muon optimizer for matrices, with learning rates on AdamW's scale for any shape."""

    def __init__(
        self, matrices: Iterable[torch.nn.Parameter], lr: float, *, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for matrix in group["params"]:
                state, rate = self.state[matrix], group["lr"]
                average = state.setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                direction = orthogonal(matrix.grad.lerp(average, group["momentum"]))
                scale = 0.2 * math.sqrt(max(matrix.shape))
                matrix.mul_(1 - rate * group["weight_decay"]).add_(direction, alpha=-rate * scale)


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix with all singular values near 1, by Newton-Schulz iteration.

    >>> found = torch.linalg.svdvals(orthogonal(torch.eye(3) * torch.tensor([5.0, 1.0, 0.5])))
    >>> bool((found > 0.6).all() and (found < 1.3).all())
    True
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        square = found @ found.T
        found = torch.addmm(found, torch.addmm(square, square, square, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found
