"""The engine `own`, by the contracts of every engine and of those whose sequences move."""

from __future__ import annotations

from typing import Any

from on_device import LOG_PROB_TOLERANCE

from rlhfspec.engine import Engine
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.engine.loading import make_engine
from rlhfspec.testing.engine import EngineContract
from rlhfspec.testing.movable import MovableContract
from rlhfspec.tiny import perturbed
from rlhfspec.tiny.tokenizer import hugging_face_tokenizer

TREE = DraftPlan(drafter="model", depth=4, width=2, branch=3)
CHAIN = DraftPlan(drafter="model", depth=3, width=1, branch=1)
SUFFIX_TREE = DraftPlan(drafter="suffix", depth=4, width=2, branch=2)


def make(model: Any, mode: str | DraftPlan) -> Engine:
    config = EngineConfig(max_sequences=8, max_context=96, profile=False, num_threads=1, speculation=mode)
    return make_engine(model, config, draft=perturbed(model, 0.15), tokenizer=hugging_face_tokenizer())


class TestEngine(EngineContract):
    log_prob_tolerance = LOG_PROB_TOLERANCE
    modes = ("off", "suffix", "model", "adaptive", "suffix-d4", "model-d4", TREE, CHAIN, SUFFIX_TREE)

    def make(self, model: Any, mode: Any) -> Engine:
        return make(model, mode)


class TestMovable(MovableContract):
    log_prob_tolerance = LOG_PROB_TOLERANCE
    modes = ("off", "adaptive", TREE, SUFFIX_TREE)

    def make(self, model: Any, mode: Any) -> Engine:
        return make(model, mode)
