"""Build an engine around models already in memory."""

from __future__ import annotations

from typing import Any

from rlhfspec.common.ranks.group import Ranks
from rlhfspec.engine.config import EngineConfig
from rlhfspec.engine.core import Engine
from rlhfspec.engine.forward.models import make_state


def make_engine(
    model: Any, config: EngineConfig, *, draft: Any = None, tokenizer: Any = None, group: Ranks | None = None
) -> Engine:
    """Build an engine of Hugging Face models, which are modified in place, so pass copies. `group`: the processes that
    share the model (`huggingface.cutting`), of which this is rank 0; the others call
    `engine.forward.models.follow_engine`.

    Example (tests):
        >>> make_engine(LlamaForCausalLM(tiny), EngineConfig(max_context=64))    # doctest: +SKIP
    """
    return Engine(make_state(model, config, draft=draft, tokenizer=tokenizer, group=group))
