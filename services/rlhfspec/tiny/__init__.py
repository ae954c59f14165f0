"""Small models for tests, benchmarks and demos, made on this machine or shipped, and cached.

`ensure()` returns trained ones, `random_model(kind)` untrained ones; `resolve(path)` makes a job's `tiny:NAME`.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:  # corpus and tokenizer are used without torch, so nothing is imported here
    if name in ("TinyModels", "ensure", "perturbed", "widened"):
        from rlhfspec.tiny import models

        return getattr(models, name)
    if name in ("MODEL_KINDS", "large_kv_model", "random_model"):
        from rlhfspec.tiny import random_models

        return getattr(random_models, name)
    if name in ("check", "resolve"):
        from rlhfspec.tiny import paths

        return getattr(paths, name)
    raise AttributeError(name)
