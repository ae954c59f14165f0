"""From the sources' numbers to one reward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Combination = Literal["sum", "min", "product"]


def combine(how: Combination, weights: Sequence[float], components: Sequence[float]) -> float:
    """Of the weighted components, in the order of the job.

    Example:
        >>> combine("sum", [1.0, 0.5], [1.0, -2.0]), combine("min", [1.0, 0.5], [1.0, -2.0])
        (0.0, -1.0)
        >>> combine("product", [1.0, 0.5], [1.0, -2.0])
        -1.0
    """
    weighted = [weight * component for weight, component in zip(weights, components, strict=True)]
    if how == "min":
        return min(weighted)
    return math.prod(weighted) if how == "product" else sum(weighted)
