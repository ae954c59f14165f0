"""Input of a plan: generators and their unfinished sequences, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rlhfspec.common.arrays import BoolArray, Floats

Ints = npt.NDArray[np.int64]
Numbers = Sequence[float] | Floats | Ints | BoolArray
OF_SEQUENCES = ("generator", "generated", "held", "remaining", "limit", "moved_at")
MUCH = 1 << 40  # unlimited room


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerSettings:
    pause_seconds: float = 0.02  # of one move: about one step of the destination and 5 ms
    num_rounds: int = 4  # moves per generator and plan
    least_share: float = 0.05  # smaller differences of two ends, as a share of the later one, are ignored
    least_pauses: float = 4.0  # as are differences below this many pauses
    rest_seconds: float = 0.5  # between two moves of one sequence
    moves_of_leaving: int = 32  # moves per plan from a generator that is leaving or should be empty
    engine_cost: float = 0.0  # of another running engine, as a share of the host's remaining time
    consolidating_share: float = 0.05  # by which another number of engines of a host must be faster
    scoring_seconds: float = 1.0  # a generator that stays idle for longer may score
    learns: bool = False  # the generators train their drafters


STANDARD = PlannerSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Generators [N] and their sequences [S], sorted by generator.

    A step of B sequences takes `step_seconds + sequence_seconds * B` while the host's other engines run, and
    `alone_step_seconds + alone_sequence_seconds * B` on an engine alone on its host.
    """

    step_seconds: Floats
    sequence_seconds: Floats
    alone_step_seconds: Floats
    alone_sequence_seconds: Floats
    prefill_owed: Floats  # seconds
    free_rows: Ints
    free_tokens: Ints  # of free KV blocks
    weights_version: Ints
    is_leaving: BoolArray
    is_prefilling: BoolArray  # takes prompts and hands its sequences over by itself
    host: Ints

    generator: Ints
    generated: Ints  # response tokens so far
    held: Ints  # prompt and response tokens, with which its KV grows
    remaining: Floats  # tokens expected to come
    limit: Ints  # most tokens that can come
    moved_at: Floats  # seconds on the planner's clock; -inf: never

    def __post_init__(self) -> None:
        assert (np.diff(self.generator) >= 0).all(), "sequences are sorted by generator"

    @property
    def num_generators(self) -> int:
        return len(self.step_seconds)

    @property
    def num_sequences(self) -> int:
        return len(self.generator)

    @property
    def takes_part(self) -> BoolArray:
        """Return [N]: whether sequences may move to and, for a better balance, from a generator."""
        return ~(self.is_leaving | self.is_prefilling)

    @property
    def starts(self) -> Ints:
        return np.searchsorted(self.generator, np.arange(self.num_generators + 1))

    def work(self) -> tuple[Floats, Floats]:
        starts = self.starts
        return segment_sums(self.remaining, starts), segment_maxima(self.remaining, starts)

    def only(self, chosen: BoolArray) -> Fleet:
        return replace(self, **{name: getattr(self, name)[chosen] for name in OF_SEQUENCES})

    def moved(self, sequence: int, destination: int, now: float) -> Fleet:
        generator, moved_at = self.generator.copy(), self.moved_at.copy()
        free_rows, free_tokens = self.free_rows.copy(), self.free_tokens.copy()
        for place, sign in ((generator[sequence], 1), (destination, -1)):
            free_rows[place] += sign
            free_tokens[place] += sign * self.held[sequence]
        generator[sequence], moved_at[sequence] = destination, now
        there = replace(self, free_rows=free_rows, free_tokens=free_tokens, generator=np.sort(generator))
        order = np.argsort(generator, kind="stable")
        columns = {name: getattr(self, name)[order] for name in OF_SEQUENCES[1:-1]}
        return replace(there, moved_at=moved_at[order], **columns)

    @classmethod
    def of(
        cls,
        *,
        step_seconds: Numbers,
        sequence_seconds: Numbers,
        generator: Numbers,
        remaining: Numbers,
        alone_step_seconds: Numbers | None = None,
        alone_sequence_seconds: Numbers | None = None,
        prefill_owed: Numbers | None = None,
        free_rows: Numbers | None = None,
        free_tokens: Numbers | None = None,
        weights_version: Numbers | None = None,
        is_leaving: Numbers | None = None,
        is_prefilling: Numbers | None = None,
        host: Numbers | None = None,
        generated: Numbers | None = None,
        held: Numbers | None = None,
        limit: Numbers | None = None,
        moved_at: Numbers | None = None,
    ) -> Fleet:
        """Build a fleet; defaults: unlimited room, one weights version, none leaving or prefilling, a host each."""
        num_generators, num_sequences = len(step_seconds), len(generator)

        def ints(given: Numbers | None, default: int, size: int) -> Ints:
            return np.full(size, default, np.int64) if given is None else np.asarray(given, np.int64)

        def floats(given: Numbers | None, default: float, size: int) -> Floats:
            return np.full(size, default) if given is None else np.asarray(given, np.float64)

        return cls(
            step_seconds=np.asarray(step_seconds, np.float64),
            sequence_seconds=np.asarray(sequence_seconds, np.float64),
            alone_step_seconds=np.asarray(
                alone_step_seconds if alone_step_seconds is not None else step_seconds, float
            ),
            alone_sequence_seconds=np.asarray(
                alone_sequence_seconds if alone_sequence_seconds is not None else sequence_seconds, float
            ),
            prefill_owed=floats(prefill_owed, 0.0, num_generators),
            free_rows=ints(free_rows, MUCH, num_generators),
            free_tokens=ints(free_tokens, MUCH, num_generators),
            weights_version=ints(weights_version, 0, num_generators),
            is_leaving=ints(is_leaving, 0, num_generators).astype(bool),
            is_prefilling=ints(is_prefilling, 0, num_generators).astype(bool),
            host=np.arange(num_generators) if host is None else np.asarray(host, np.int64),
            generator=np.asarray(generator, np.int64),
            generated=ints(generated, 0, num_sequences),
            held=ints(held, 0, num_sequences),
            remaining=np.asarray(remaining, np.float64),
            limit=ints(limit, MUCH, num_sequences),
            moved_at=floats(moved_at, -np.inf, num_sequences),
        )


def members_of(starts: Ints, generators: Ints) -> tuple[Ints, Ints]:
    """Return the indices of these generators' sequences, concatenated, and each generator's count.

    >>> [array.tolist() for array in members_of(np.array([0, 2, 2, 5]), np.array([0, 2]))]
    [[0, 1, 2, 3, 4], [2, 3]]
    """
    counts = starts[generators + 1] - starts[generators]
    ends = np.cumsum(counts)
    return np.arange(counts.sum()) + np.repeat(starts[generators] - (ends - counts), counts), counts


def segment_sums(values: Floats, starts: Ints) -> Floats:
    """Return the sum of each segment [starts[i], starts[i + 1]), 0 if empty."""
    return _reduced(np.add, values, starts)


def segment_maxima(values: Floats, starts: Ints) -> Floats:
    return _reduced(np.maximum, values, starts)


def _reduced(how: np.ufunc, values: Floats, starts: Ints) -> Floats:
    reduced = np.zeros(len(starts) - 1)
    filled = starts[1:] > starts[:-1]  # reduceat returns the value itself for an empty segment
    if filled.any():
        reduced[filled] = how.reduceat(values, starts[:-1][filled])
    return reduced
