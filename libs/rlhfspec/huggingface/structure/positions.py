"""What a model's configuration alone says: how long a sequence of a job can be. Torch-free."""

from __future__ import annotations

from typing import Any

from rlhfspec.job import RLHFJob


def positions_in(config: Any) -> int | None:
    """How many positions the decoder was made for, also within a model for more than text; None: it does not say."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def config_of(path: str) -> Any:
    """Of the model at `path`, a folder or a hub id; None where it cannot be read: loading the model says more."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return None


def num_positions(path: str) -> int | None:
    config = config_of(path)
    return None if config is None else positions_in(config)


def max_context(job: RLHFJob) -> int:
    """Tokens of prompt and response together that every stage makes room for."""
    return min(job.spec.max_context, num_positions(job.spec.model.path) or job.spec.max_context)
