"""Training of a drafter before a run, on completions of the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import numpy as np
import torch

from rlhfspec.engine.base import LearningReport, Request
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine, make_engine
from rlhfspec.engine.distilling.eagle_student import EagleStudent
from rlhfspec.engine.distilling.student import LearningCopy, Student
from rlhfspec.engine.forward.models import load_drafter
from rlhfspec.engine.params import SamplingParams
from rlhfspec.huggingface.heads.eagle import is_eagle, load_head, new_head
from rlhfspec.huggingface.loading import load_model, load_stored

AT_ONCE = 16  # sequences learnt from at a time
_SAMPLED = 64  # answers whose tokens are counted
_MOST_DRAFTED, _SHARE_DRAFTED = 32768, 6  # tokens of a new head; its output costs most of its time


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


def begin(
    path: str, drafter: str | None, config: EngineConfig, prompts: Sequence[Sequence[int]], params: SamplingParams,
    *, is_over: Callable[[], bool] = lambda: False,
) -> Engine:  # fmt: skip
    """Return an engine whose drafter learns: the one named, or a new EAGLE-3 head for tokens that answers hold."""
    model = load_stored(path)
    if drafter is not None:
        return make_engine(model, config, draft=load_drafter(drafter, model, field="drafter"))
    weight = model.get_output_embeddings().weight.detach().clone()
    engine = make_engine(model, config, draft=new_head(model, min(_MOST_DRAFTED, len(weight) // _SHARE_DRAFTED)))
    student, eagle = engine.state.student, engine.state.eagle
    assert isinstance(student, EagleStudent)
    assert eagle is not None
    for request in islice(_requests(prompts, params), _SAMPLED):
        engine.submit(request)
    counts = np.zeros(len(weight), np.int64)
    while engine.has_work and not is_over():
        for answer in engine.step().finished:
            np.add.at(counts, list(answer.token_ids), 1)
    ids = np.sort(np.argsort(-counts, kind="stable")[: student.model.num_draft_tokens])
    student.draft_with(ids.tolist(), weight[torch.from_numpy(ids)])
    eagle.load_weights(student.state_dict())
    return engine


def student_of(drafter: str) -> LearningCopy:
    """Load a drafter to take learnt weights."""
    if is_eagle(drafter):
        return EagleStudent(load_head(drafter))
    return Student(load_model(drafter), max_context=1)


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
