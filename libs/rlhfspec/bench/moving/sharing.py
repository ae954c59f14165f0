"""What a stage takes by the measured curve: as dealt, dealt by someone who knows all lengths, or shared ideally.

A token of each of B sequences takes `curve.token_seconds(B)`, measured while the neighbour runs likewise. So a
generator that drains what it has takes the sum of that over token indices, B being those not yet finished.

Example: a curve of .01 s whatever the batch; the longest sequence decides alone.
    >>> curve = Curve(sizes=(1, 64), seconds=(0.01, 0.01), prefill_seconds=0.0)
    >>> round(drain_seconds([100, 50], [8, 8], curve), 3)
    1.0
    >>> round(ideal_seconds([100, 50], [8, 8], curve), 3)
    1.0
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64s = npt.NDArray[np.float64]
NUM_GENERATORS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """seconds[i]: of a token of each of sizes[i] sequences. prefill_seconds: of one prompt token."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]
    prefill_seconds: float

    def token_seconds(self, num_sequences: Float64s) -> Float64s:
        """Straight lines between what was measured; beyond it, as the last of them goes on."""
        return np.interp(num_sequences, self.sizes, self.seconds)

    @property
    def law(self) -> tuple[float, float]:
        """t0 and c of `t0 + c * B`, neither below 0, by least squares of the relative error."""
        sizes, seconds = np.asarray(self.sizes, float), np.asarray(self.seconds, float)
        columns = np.stack([1 / seconds, sizes / seconds], axis=1)
        (fixed, each), *_ = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)
        if fixed < 0:
            fixed, each = 0.0, float((sizes / seconds).sum() / ((sizes / seconds) ** 2).sum())
        return float(fixed), max(float(each), 0.0)


def drain_seconds(lengths: Sequence[int], prompt_lengths: Sequence[int], curve: Curve) -> float:
    """One generator that begins with all of these and gets no others."""
    prefill = curve.prefill_seconds * sum(prompt_lengths)
    if not lengths:
        return 0.0
    ends = np.sort(np.asarray(lengths, float))
    alive = np.arange(len(ends), 0, -1).astype(float)  # until each end
    return prefill + float((np.diff(ends, prepend=0.0) * curve.token_seconds(alive)).sum())


def stage_seconds(
    lengths: Sequence[int], prompt_lengths: Sequence[int], placement: Sequence[int], curve: Curve
) -> float:
    """The later end of the generators."""
    return max(drain_seconds(*_of(half, lengths, prompt_lengths, placement), curve) for half in range(NUM_GENERATORS))


def ideal_seconds(lengths: Sequence[int], prompt_lengths: Sequence[int], curve: Curve) -> float:
    """Every generator always equally full: nobody who does not know the lengths does better."""
    ends = np.sort(np.asarray(lengths, float))
    alive = np.ceil(np.arange(len(ends), 0, -1) / NUM_GENERATORS)
    decoding = float((np.diff(ends, prepend=0.0) * curve.token_seconds(alive)).sum())
    return decoding + curve.prefill_seconds * sum(prompt_lengths) / NUM_GENERATORS


def clairvoyant(lengths: Sequence[int], prompt_lengths: Sequence[int], curve: Curve) -> tuple[int, ...]:
    """The best placement for one who knows all lengths, prefill included: longest first to the emptier generator, then
    moves and swaps as long as one helps.

    >>> clairvoyant([9, 9, 2, 2], [1] * 4, Curve(sizes=(1, 4), seconds=(1.0, 4.0), prefill_seconds=0.5))
    (0, 1, 0, 1)
    """
    fixed, each = curve.law
    placement = [0] * len(lengths)
    loads = [0.0] * NUM_GENERATORS
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        placement[index] = loads.index(min(loads))
        loads[placement[index]] += each * lengths[index] + curve.prefill_seconds * prompt_lengths[index]
        loads[placement[index]] += fixed * lengths[index] / len(lengths)  # so that a flat curve decides something too
    best = stage_seconds(lengths, prompt_lengths, placement, curve)
    while True:
        found, tried = min(
            ((stage_seconds(lengths, prompt_lengths, other, curve), other) for other in _neighbours(placement)),
        )
        if found >= best * (1 - 1e-6):
            return tuple(placement)
        best, placement = found, tried


def _neighbours(placement: list[int]) -> Iterable[list[int]]:
    """One sequence elsewhere, or two of different generators exchanged."""
    for first in range(len(placement)):
        moved = placement.copy()
        moved[first] = 1 - moved[first]
        yield moved
        for second in range(first + 1, len(placement)):
            if placement[second] != placement[first]:
                swapped = moved.copy()
                swapped[second] = placement[first]
                yield swapped


def _of(
    half: int, lengths: Sequence[int], prompt_lengths: Sequence[int], placement: Sequence[int]
) -> tuple[list[int], list[int]]:
    mine = [i for i, at in enumerate(placement) if at == half]
    return [lengths[i] for i in mine], [prompt_lengths[i] for i in mine]
