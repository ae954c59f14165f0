"""The generation engine. `Engine` is imported lazily, because it needs torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlhfspec.engine.base import Completion, EngineProtocol, EngineStats, EngineStep, Request
from rlhfspec.engine.params import SamplingParams

if TYPE_CHECKING:
    from rlhfspec.engine.core import Engine

__all__ = ["Completion", "Engine", "EngineProtocol", "EngineStats", "EngineStep", "Request", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "Engine":  # import torch only when tokens are generated
        from rlhfspec.engine.core import Engine

        return Engine
    raise AttributeError(name)
