import functools
from typing import Any

import numpy as np
import pytest
from on_device import LOG_PROB_TOLERANCE
from worst_drafter import noisy

from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine, make_engine
from rlhfspec.engine.distilling import learning as distilling
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.huggingface.heads.eagle import new_head
from rlhfspec.testing import engine as contract, movable
from rlhfspec.testing.engine import EngineContract
from rlhfspec.testing.movable import MovableWithKVContract
from rlhfspec.tiny import perturbed, random_model
from rlhfspec.tiny.tokenizer import VOCAB_SIZE, hugging_face_tokenizer

pytestmark = pytest.mark.turns(parts=2)

TREE = DraftPlan(drafter="model", depth=4, width=2, branch=3)
SUFFIX_TREE = DraftPlan(drafter="suffix", depth=4, width=2, branch=2)


def make(model: Any, mode: str | DraftPlan, draft: Any = None, **options: Any) -> Engine:
    config = EngineConfig(max_sequences=8, max_context=96, profile=False, num_threads=1, speculation=mode, **options)
    return make_engine(model, config, draft=draft or perturbed(model, 0.15), tokenizer=hugging_face_tokenizer())


@functools.cache
def deep_model() -> Any:
    return random_model("llama", seed=3, vocab_size=VOCAB_SIZE, num_layers=8, head_dim=32)


def learning(model: Any, mode: str | DraftPlan) -> Engine:
    """Return an engine with a drafter that learns between steps and turns to noise."""
    engine = noisy(make(model, mode, new_head(model, 100), learning=1.0), np.random.default_rng(5))
    step = engine.step

    def step_and_learn() -> Any:
        report = step()
        engine.learning.learn_while_idle()
        return report

    engine.step = step_and_learn  # type: ignore[method-assign]
    return engine


@pytest.fixture
def little_is_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the thresholds, so that short responses make optimizer steps that reach the drafter."""
    monkeypatch.setattr(distilling, "LESSON_TOKENS", 16)
    monkeypatch.setattr(distilling, "_SWAP_EVERY", 1)
    for suite in (contract, movable):
        monkeypatch.setattr(suite, "reference", deep_model)  # a head needs more layers than the suite's model has


class TestEngine(EngineContract):
    log_prob_tolerance = LOG_PROB_TOLERANCE
    modes = ("off", "suffix", "model", "adaptive", "suffix-d4", "model-d4", TREE, SUFFIX_TREE)

    def make(self, model: Any, mode: Any) -> Engine:
        return make(model, mode)


class TestMovable(MovableWithKVContract):
    log_prob_tolerance = LOG_PROB_TOLERANCE
    modes = ("off", "adaptive", TREE, SUFFIX_TREE)

    def make(self, model: Any, mode: Any) -> Engine:
        return make(model, mode)


@pytest.mark.sweep(parts=3)
@pytest.mark.on_the_cpu("a drafter that learns takes minutes more there; one that stays drafts in its place")
@pytest.mark.usefixtures("little_is_learnt_from")
class LearningDrafter:
    log_prob_tolerance = LOG_PROB_TOLERANCE
    modes = ("off", TREE)

    def make(self, model: Any, mode: Any) -> Engine:
        return learning(model, mode)


class TestLearningDrafter(LearningDrafter, EngineContract):
    pass


class TestMovableLearningDrafter(LearningDrafter, MovableWithKVContract):
    pass
