"""Torch-free context length of a job, from model configurations."""

from __future__ import annotations

from typing import Any

from rlhfspec.job import RLHFJob


def positions_in(config: Any) -> int | None:
    """Return the decoder's number of positions, or None if unknown."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def config_of(path: str) -> Any:
    """Return the configuration of a folder or hub id, or None if unreadable (loading reports why)."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError):
        return None


def num_positions(path: str) -> int | None:
    config = config_of(path)
    return None if config is None else positions_in(config)


def max_context(job: RLHFJob) -> int:
    """Return the maximum number of prompt plus response tokens, for which every stage reserves memory."""
    return min(job.spec.max_context, num_positions(job.spec.model.path) or job.spec.max_context)
