"""Training of a drafter before a run, on completions of the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from rlhfspec.engine.base import LearningReport, Request
from rlhfspec.engine.core import Engine
from rlhfspec.engine.params import SamplingParams

AT_ONCE = 16  # sequences learnt from at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    tokens: int
    seconds: float


def distil(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    limit: Limit,
    *,
    is_over: Callable[[], bool],
    said: Callable[[LearningReport], object],
) -> LearningReport:
    """Alternate between generating completions and training on them, until a limit is reached or `is_over()`."""
    end = time.monotonic() + limit.seconds
    waiting = _requests(prompts, params)
    learning = engine.abilities.learning
    assert learning is not None, "the engine's drafter learns"

    def goes_on() -> bool:
        return not is_over() and time.monotonic() < end and learning.report.num_tokens < limit.tokens

    while goes_on():
        if not engine.has_work:
            for _ in range(AT_ONCE):
                engine.submit(next(waiting))
        engine.step()
        if not engine.has_work:
            while goes_on() and learning.learn_while_idle():
                pass
            said(learning.report)
    return learning.report


def drafter_of(engine: Engine) -> Any:
    """Return the trained copy, loaded with the averaged weights that the engine drafts with."""
    student, learning = engine.state.student, engine.abilities.learning
    assert student is not None, "the engine's drafter learns"
    assert learning is not None
    student.model.load_state_dict(learning.learnt().tensors, strict=False)
    return student.model


def _requests(prompts: Sequence[Sequence[int]], params: SamplingParams) -> Iterator[Request]:
    for number in count():
        prompt = tuple(prompts[number % len(prompts)])
        yield Request(id=f"distil/{number}", prompt_token_ids=prompt, params=params, seed=number)
