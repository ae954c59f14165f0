"""Order of rows by step, a pure function of (seed, step).

With P = `prompts_per_step`, step s takes positions [(s - 1) * P, s * P) of the concatenated epoch permutations.
Round r of dynamic sampling numbers its prompts from r * P on. Extra rounds first take rows unused in round 0.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rlhfspec.errors import DataExhausted, InvalidRequest

IndexArray = NDArray[np.int64]
_CACHED_PERMUTATIONS = 4  # permutations; a step touches two epochs at most when the data is larger than the step


def num_steps(num_rows: int, prompts_per_step: int, epochs: int | None) -> int | None:
    """Return the number of steps in the epochs, or None for endless data.

    >>> num_steps(10, 4, 1), num_steps(10, 4, 2), num_steps(10, 4, None)
    (2, 5, None)
    """
    return None if epochs is None else epochs * num_rows // prompts_per_step


def permutation(seed: int, purpose: str, size: int) -> IndexArray:
    """Return a permutation drawn from (seed, purpose), the same in all numpy versions."""
    digest = hashlib.blake2b(f"{seed}:{purpose}".encode(), digest_size=16).digest()
    words = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(size)
    return np.argsort(words, kind="stable").astype(np.int64)


@dataclass(slots=True, kw_only=True)
class Order:
    """Order of rows by step. epochs: None repeats forever. shuffle: if False, round 0 keeps the data's order."""

    num_rows: int
    prompts_per_step: int
    seed: int
    shuffle: bool = True
    epochs: int | None = None
    _cache: OrderedDict[str, IndexArray] = field(default_factory=OrderedDict, repr=False)

    def __post_init__(self) -> None:
        assert self.num_rows > 0, "an empty dataset has no order"
        if self.last_step == 0:
            raise InvalidRequest(
                "spec.training.promptsPerStep",
                self.prompts_per_step,
                f"the dataset has {self.num_rows} prompts in {self.epochs} epochs, fewer than the first step needs",
            )

    @property
    def last_step(self) -> int | None:
        return num_steps(self.num_rows, self.prompts_per_step, self.epochs)

    def indices(self, step: int, round: int = 0, count: int | None = None) -> list[int]:
        """Return row indices of a step's round: 0, or an extra one. count: by default `prompts_per_step`."""
        count = self.prompts_per_step if count is None else count
        if step < 1 or round < 0 or not 0 <= count <= self.prompts_per_step:
            raise InvalidRequest("step, round, count", (step, round, count), f"at most {self.prompts_per_step} a round")
        if self.last_step is not None and step > self.last_step:
            assert self.epochs is not None
            raise DataExhausted(self.last_step, self.num_rows, self.epochs)
        if round == 0:
            return self._span((step - 1) * self.prompts_per_step, count)
        return self._demanded(step, (round - 1) * self.prompts_per_step, count)

    def places(self, round: int = 0, count: int | None = None) -> range:
        """Return the prompt numbers within the step (`Prompt.prompt`) of a round's rows."""
        first = round * self.prompts_per_step
        return range(first, first + (self.prompts_per_step if count is None else count))

    def _span(self, start: int, count: int) -> list[int]:
        positions = np.arange(start, start + count)
        epochs, offsets = np.divmod(positions, self.num_rows)
        return [int(self._epoch(int(epoch))[offset]) for epoch, offset in zip(epochs, offsets, strict=True)]

    def _epoch(self, epoch: int) -> IndexArray:
        return self._permutation(f"epoch {epoch}") if self.shuffle else np.arange(self.num_rows)

    def _demanded(self, step: int, start: int, count: int) -> list[int]:
        """Return `count` row indices for extra rounds: rows that round 0 leaves out, then all rows repeatedly."""
        own = np.unique(self._span((step - 1) * self.prompts_per_step, self.prompts_per_step))
        first = self._permutation(f"step {step} pass 0")
        fresh = first[~np.isin(first, own)]
        chosen = []
        for position in range(start, start + count):
            if position < len(fresh):
                chosen.append(int(fresh[position]))
            else:
                again, offset = divmod(position - len(fresh), self.num_rows)
                chosen.append(int(self._permutation(f"step {step} pass {again + 1}")[offset]))
        return chosen

    def _permutation(self, purpose: str) -> IndexArray:
        if purpose not in self._cache:
            self._cache[purpose] = permutation(self.seed, purpose, self.num_rows)
            if len(self._cache) > _CACHED_PERMUTATIONS:
                self._cache.popitem(last=False)
        return self._cache[purpose]
