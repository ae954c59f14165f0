"""Array types, and `concatenate_ranges`, which numpy lacks."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]


def concatenate_ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """Concatenate the ranges [starts[i], starts[i] + counts[i]).

    >>> concatenate_ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.fromiter(itertools.accumulate(counts.tolist()), np.int64, len(counts))
    total = int(ends[-1]) if len(ends) else 0
    positions: IntArray = (np.arange(total) + np.repeat(starts - (ends - counts), counts)).astype(np.int32)
    return positions
