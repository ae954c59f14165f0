"""Training of an EAGLE-3 drafter before a run, on completions of the policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice

import numpy as np
import torch

from rlhfspec.engine.base import LearningReport, Request
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine, make_engine
from rlhfspec.engine.forward.models import load_drafter
from rlhfspec.engine.params import SamplingParams
from rlhfspec.huggingface.heads.eagle import EagleHead, new_head
from rlhfspec.huggingface.loading import load_stored

AT_ONCE = 16  # sequences learnt from at a time
_SAMPLED = 64  # answers whose tokens are counted
_MOST_DRAFTED, _SHARE_DRAFTED = 32768, 6  # tokens of a new head; its output costs most of its time


def distil(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    tokens: int,
    seconds: float,
    is_over: Callable[[], bool],
    said: Callable[[LearningReport], object],
) -> LearningReport:
    """Alternate between generating completions and training on them, until a limit is reached or `is_over()`."""
    end = time.monotonic() + seconds
    waiting, learning = _requests(prompts, params), engine.learning
    assert learning is not None, "the engine's drafter learns"

    def goes_on() -> bool:
        return not is_over() and time.monotonic() < end and learning.report.num_tokens < tokens

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
    """Return an engine whose drafter learns: the one named, or a new one for tokens that answers hold."""
    model = load_stored(path)
    if drafter is not None:
        return make_engine(model, config, draft=load_drafter(drafter, model, field="drafter"))
    weight = model.get_output_embeddings().weight.detach().clone()
    engine = make_engine(model, config, draft=new_head(model, min(_MOST_DRAFTED, len(weight) // _SHARE_DRAFTED)))
    student, eagle = engine.state.student, engine.state.eagle
    assert student is not None
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


def drafter_of(engine: Engine) -> EagleHead:
    """Return the trained copy, loaded with the averaged weights that the engine drafts with."""
    student, learning = engine.state.student, engine.learning
    assert student is not None, "the engine's drafter learns"
    assert learning is not None
    student.model.load_state_dict(learning.learnt().tensors, strict=False)
    return student.model


def _requests(prompts: Sequence[Sequence[int]], params: SamplingParams) -> Iterator[Request]:
    for number in count():
        prompt = tuple(prompts[number % len(prompts)])
        yield Request(id=f"distil/{number}", prompt_token_ids=prompt, params=params, seed=number)
