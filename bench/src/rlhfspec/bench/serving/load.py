"""Load of `rlhfspec bench serve`: chats that arrive at random, and rollouts. Every mode of a repetition gets the same.

Example:
    >>> first, second = chats(["Hello", "Good morning"], 2, rate=2.0, num_tokens=8, repetition=0)
    >>> 0 < first.at < second.at, first.seed != second.seed
    (True, True)
    >>> [each.group for each in itertools.islice(rollouts([(1, 2)], num_tokens=8, repetition=0), 7, 9)]
    [0, 1]
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

WARM_TOKENS = 2  # of each rollout, before chats arrive
_SIBLINGS = 8  # rollouts of one prompt
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrivingChat:
    at: float  # seconds after the beginning
    text: str
    num_tokens: int  # of the answer
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRollout:
    prompt: tuple[int, ...]
    num_tokens: int
    seed: int
    group: int


def chats(
    texts: Sequence[str], count: int, *, rate: float, num_tokens: int, repetition: int
) -> list[ArrivingChat]:  # fmt: skip
    """Return chats that arrive as a Poisson process of `rate` a second, with answers of up to `num_tokens`."""
    draw = random.Random(f"chats {repetition}")
    arrivals = itertools.accumulate(draw.expovariate(rate) for _ in range(count))
    return [
        ArrivingChat(
            at=at, text=draw.choice(texts), num_tokens=_length(draw, num_tokens), seed=draw.getrandbits(48)
        )
        for at in list(arrivals)
    ]  # fmt: skip


def rollouts(prompts: Sequence[Sequence[int]], *, num_tokens: int, repetition: int) -> Iterator[PlannedRollout]:
    """Yield rollouts without end, in groups that share a prompt."""
    draw = random.Random(f"rollouts {repetition}")
    for index in itertools.count():
        group = index // _SIBLINGS
        prompt = tuple(prompts[group % len(prompts)])
        length, seed = _length(draw, num_tokens), draw.getrandbits(48)
        yield PlannedRollout(prompt=prompt, num_tokens=length, seed=seed, group=group)


def _length(draw: random.Random, most: int) -> int:
    return draw.randint(max(most // 2, 2), most)


class ServingLoop:
    """Event loop in a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def start(self, coroutine: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
