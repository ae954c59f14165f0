"""Workloads of the simulator: response lengths, their prompts, and the generators they are dealt to.

Lengths are lognormal, as responses are; `correlation` is between log lengths of one prompt's samples.

Example:
    >>> work = workload("groups", num_generators=2, per_generator=32, seed=2)
    >>> work.num_sequences, int(work.lengths.max()) <= 960, np.bincount(work.dealt).tolist()
    (64, True, [32, 32])
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from rlhfspec.common.arrays import Floats
from rlhfspec.errors import InvalidRequest, did_you_mean

Ints = npt.NDArray[np.int64]
Kind = Literal["independent", "groups", "skew", "adversarial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sequences of a stage, as arrays [S]. Only clairvoyant policies may read `lengths` before a sequence has ended."""

    lengths: Ints  # tokens of the response, >= 1
    prompt_tokens: Ints
    prompts: Ints  # which prompt it answers
    dealt: Ints  # the generator that it goes to when prompts are dealt
    limit: int  # the most tokens a response may have

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthShape:
    median: float = 128.0
    sigma: float = 1.0
    limit: int = 960
    samples_per_prompt: int = 8
    correlation: float = 0.8  # of log lengths within a prompt, in `groups`
    shortest_prompt: int = 24
    longest_prompt: int = 96


def workload(
    kind: str, *, num_generators: int, per_generator: int, seed: int, shape: LengthShape = LengthShape()
) -> Workload:
    """Draw the work of a stage.

    `groups` makes a prompt's lengths alike and deals its samples together. `skew` deals the longer half to the first
    half of the generators. With `adversarial`, lengths of ended sequences predict nothing.
    """
    if kind not in get_args(Kind):
        kinds = get_args(Kind)
        reason = f"must be one of {', '.join(kinds)}, or a run's folder{did_you_mean(kind, kinds)}"
        raise InvalidRequest("lengths", kind, reason)
    random = np.random.default_rng([seed, 11])
    count = num_generators * per_generator
    prompts = np.arange(count) // shape.samples_per_prompt
    prompt_tokens = random.integers(shape.shortest_prompt, shape.longest_prompt + 1, prompts[-1] + 1)[prompts]
    if kind == "adversarial":
        lengths = _adversarial(random, count, shape)
    else:
        shared = shape.correlation if kind == "groups" else 0.0
        noise = random.standard_normal(count) * np.sqrt(1 - shared)
        noise += random.standard_normal(prompts[-1] + 1)[prompts] * np.sqrt(shared)
        lengths = np.exp(np.log(shape.median) + shape.sigma * noise)
    whole = Workload(
        lengths=np.clip(np.rint(lengths), 1, shape.limit).astype(np.int64),
        prompt_tokens=prompt_tokens.astype(np.int64),
        prompts=prompts,
        dealt=prompts % num_generators,
        limit=shape.limit,
    )
    return dealt_by(whole, kind, num_generators)


def dealt_by(work: Workload, kind: str, num_generators: int) -> Workload:
    """Return the work dealt in turn by whole prompts or, for `skew`, with the longer half on the first generators."""
    if kind != "skew":
        return replace(work, dealt=work.prompts % num_generators)
    rank = np.empty(work.num_sequences, dtype=np.int64)
    rank[np.argsort(-work.lengths, kind="stable")] = np.arange(work.num_sequences)
    first = max(num_generators // 2, 1)
    is_long = rank < work.num_sequences * first // num_generators
    return replace(work, dealt=np.where(is_long, rank % first, first + rank % max(num_generators - first, 1)))


def _adversarial(random: np.random.Generator, count: int, shape: LengthShape) -> Floats:
    """Draw lengths in which those of ended sequences mislead predictions of the rest.

    Nine of ten end within a tenth of the limit, one of a hundred at the limit, the rest in between.
    """
    shares = random.random(count)
    lengths = random.uniform(1, shape.limit / 10, count)
    late = shares > 0.9
    lengths[late] = random.uniform(shape.limit / 10, shape.limit, int(late.sum()))
    lengths[shares > 0.99] = shape.limit
    return lengths
