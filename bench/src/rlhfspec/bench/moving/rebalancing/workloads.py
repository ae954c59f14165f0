"""Stages with unequal work: sequences, and the one of two generators on which each begins.

Lengths are synthetic: lognormal, with the end of sequence ignored. As in real rollouts, the longest of 64 responses has
many times the usual 128 tokens:

    skew         the longer half of the responses is on one generator
    groups       8 prompts of 8 samples with similar lengths; a prompt is on one generator
    independent  dealt in turn, with uncorrelated lengths

Example:
    >>> stage = StageWorkload.of("skew", seed=1)
    >>> stage.num_sequences, stage.dealt.count(0), stage.dealt.count(1)
    (64, 32, 32)
    >>> stage.imbalance > 2  # times as many tokens here as there
    True
    >>> StageWorkload.of("groups", seed=1).groups[:9]
    (0, 0, 0, 0, 0, 0, 0, 0, 1)
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from rlhfspec.errors import InvalidRequest
from rlhfspec.tiny.corpus import prompts

SKEW, GROUPS, INDEPENDENT = "skew", "groups", "independent"
WORKLOADS = (SKEW, GROUPS, INDEPENDENT)
NUM_PROMPTS, NUM_SAMPLES = 8, 8
MEDIAN, SIGMA, CORRELATION = 128, 1.0, 0.8
SHORTEST, LONGEST_RESPONSE = 4, 960
SHORTEST_PROMPT, LONGEST_PROMPT = 24, 96
LEAST_IMBALANCE = 1.5  # `groups` with more equal halves leave nothing to gain


@dataclass(frozen=True, slots=True, kw_only=True)
class StageWorkload:
    """Sequences of a stage: prompts, response lengths, prompt numbers and generators."""

    workload: str
    seed: int
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    groups: tuple[int, ...]
    dealt: tuple[int, ...]

    @classmethod
    def of(cls, workload: str, seed: int, scale: float = 1.0) -> StageWorkload:
        """Draw a stage; a `scale` below 1 shortens responses."""
        if workload not in WORKLOADS:
            raise InvalidRequest("workloads", workload, f"must be among {', '.join(WORKLOADS)}")
        count = NUM_PROMPTS * NUM_SAMPLES
        groups = tuple(i // NUM_SAMPLES if workload == GROUPS else i for i in range(count))
        lengths = tuple(draw_lengths(groups, seed=seed, scale=scale))
        order = sorted(range(count), key=lambda i: (-lengths[i], i))
        dealt = tuple(groups[i] % 2 for i in range(count))
        if workload == SKEW:
            longer = set(order[: count // 2])
            dealt = tuple(0 if i in longer else 1 for i in range(count))
        texts = _prompts(max(groups) + 1, seed)
        chosen = tuple(texts[group] for group in groups)
        return cls(workload=workload, seed=seed, prompts=chosen, lengths=lengths, groups=groups, dealt=dealt)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def imbalance(self) -> float:
        """Return the number of tokens on the fuller generator divided by the other's."""
        halves = [sum(n for n, at in zip(self.lengths, self.dealt, strict=True) if at == half) for half in (0, 1)]
        return max(halves) / max(min(halves), 1)


def draw_lengths(groups: tuple[int, ...], *, seed: int, scale: float = 1.0) -> Iterator[int]:
    """Yield a lognormal length per entry of `groups`; lengths of a group correlate by CORRELATION."""
    dice = random.Random(f"lengths {seed}")
    common = {group: dice.gauss(0, 1) for group in dict.fromkeys(groups)}
    share = CORRELATION if len(common) < len(groups) else 0.0
    for group in groups:
        deviation = math.sqrt(share) * common[group] + math.sqrt(1 - share) * dice.gauss(0, 1)
        length = scale * min(MEDIAN * math.exp(SIGMA * deviation), LONGEST_RESPONSE)
        yield max(round(length), SHORTEST)


def stages(workload: str, count: int, scale: float = 1.0) -> list[StageWorkload]:
    """Return the stages of the first `count` seeds, for `groups` of those with at least LEAST_IMBALANCE."""
    all_seeds = (StageWorkload.of(workload, seed, scale) for seed in itertools.count(1))
    wanted = (stage for stage in all_seeds if workload != GROUPS or stage.imbalance >= LEAST_IMBALANCE)
    return list(itertools.islice(wanted, count))


def earlier_lengths(count: int, scale: float = 1.0) -> list[int]:
    """Return response lengths of the job's earlier steps, drawn from the same distribution."""
    return list(draw_lengths(tuple(range(count)), seed=-1, scale=scale))


def _prompts(count: int, seed: int) -> list[tuple[int, ...]]:
    dice = random.Random(f"prompts {seed}")
    texts = prompts(count, seed=1000 + seed, shortest=LONGEST_PROMPT, longest=LONGEST_PROMPT + 1)
    return [tuple(text[: dice.randint(SHORTEST_PROMPT, LONGEST_PROMPT)]) for text in texts]
