"""Measurement of a generator's cost curve, with its neighbour idle and busy, and of prefill.

Batches of several sizes are decoded. Steps count only while the whole batch runs and no prompt is prefilled, and with
two generators only until the first generator is done.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from rlhfspec.bench.moving.pair import NUM_GENERATORS, Pair, sequences_of
from rlhfspec.bench.moving.rebalancing.prediction import MeasuredCurve
from rlhfspec.bench.moving.rebalancing.workloads import LONGEST_PROMPT, LONGEST_RESPONSE
from rlhfspec.tiny.corpus import prompts

SIZES = (1, 2, 4, 8, 16, 32, 64)
_TOKENS, _SHORTEST, _LONGEST = 2048, 40, 512  # of all sequences of a size; least and most of one
_BOTH, _ONE = tuple(range(NUM_GENERATORS)), (0,)


class EngineStepTold(NamedTuple):
    """Step reported by a generator; `at` is its end on the monotonic clock."""

    at: float
    num_decoding: int
    num_prefill_tokens: int
    num_committed: int
    seconds: float


def calibrate(
    pair: Pair,
    speculation: str,
    sizes: Sequence[int] = SIZES,
    limit: int = LONGEST_RESPONSE,
    report: Callable[[str], None] = print,
) -> MeasuredCurve:
    alone: dict[int, float] = {}
    busy: dict[int, float] = {}
    prefill: list[EngineStepTold] = []
    for size in (sizes[0], *sizes):  # the first size runs twice, to warm up
        length = min(max(_TOKENS // size, _SHORTEST), _LONGEST, limit)
        for seconds, numbers in ((busy, _BOTH), (alone, _ONE)):
            report(f"measuring the curve, {speculation}: {size} sequences on {len(numbers)}")
            steps = _run(pair, speculation, size, length, numbers, limit)
            seconds[size] = token_seconds(steps, size)
            prefill += [step for one in steps for step in one if step.num_prefill_tokens and not step.num_decoding]
    tokens = sum(step.num_prefill_tokens for step in prefill)
    return MeasuredCurve(
        sizes=tuple(sizes),
        alone=tuple(alone[size] for size in sizes),
        busy=tuple(busy[size] for size in sizes),
        prefill_seconds=sum(step.seconds for step in prefill) / max(tokens, 1),
    )


def token_seconds(generators: Iterable[list[EngineStepTold]], size: int) -> float:
    """Return the seconds that each of `size` sequences takes per token, over steps in which all ran.

    >>> steps = [EngineStepTold(at, 4, 0, 8, 0.1) for at in (0.1, 0.2, 0.3)]  # two tokens of each of four a step
    >>> round(token_seconds([steps, steps], 4), 3)
    0.05
    """
    generators = [list(steps) for steps in generators]
    end = min(steps[-1].at for steps in generators)
    full = [
        (after.at - before.at, after.num_committed)
        for steps in generators
        for before, after in itertools.pairwise(steps)
        if after.num_decoding == size and not after.num_prefill_tokens and after.at <= end
    ]
    if not full:
        raise ValueError(f"no step with {size} sequences on all generators: too few tokens each")
    return size * sum(seconds for seconds, _ in full) / sum(committed for _, committed in full)


def _run(
    pair: Pair, speculation: str, size: int, num_tokens: int, numbers: Sequence[int], limit: int
) -> list[list[EngineStepTold]]:
    texts = [tuple(text[:LONGEST_PROMPT]) for text in prompts(size, seed=size)]
    name = f"curve/{speculation}-{size}-{len(numbers)}"
    ids = [[f"{name}-{number}/{index}" for index in range(size)] for number in range(NUM_GENERATORS)]
    for number in range(NUM_GENERATORS):
        seeds = range(number * size, (number + 1) * size)
        made = sequences_of(ids[number], texts, [num_tokens] * size, seeds, range(size), max_tokens=limit)
        pair.tell(number, "stage", name=f"{name}-{number}", speculation=speculation, sequences=made)
    pair.hear_all("ready")
    for number in numbers:
        pair.tell(number, "go", ids=ids[number])
    left = len(numbers) * size
    while left:
        _, said, rest = pair.hear()
        left -= len(rest["ids"]) if said == "finished" else 0
    ended = pair.ask_all("end", "ended")
    return [told(ended[number]) for number in numbers]


def told(ended: dict[str, Any]) -> list[EngineStepTold]:
    return [EngineStepTold(*step) for step in ended["steps"]]
