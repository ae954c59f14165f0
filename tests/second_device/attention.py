"""Attention as one device kernel, computed by the CPU's kernel or its twin on the same memory."""

import dataclasses
from typing import Any

import torch

from rlhfspec.kernels.tree_attention import AttentionMeta, tree_attention
from second_device import opened

INDICES = [each.name for each in dataclasses.fields(AttentionMeta) if each.init]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv: torch.Tensor, layer: int, meta: AttentionMeta,
    **options: Any,
) -> torch.Tensor:  # fmt: skip
    if query.is_cpu:
        return tree_attention(query, key, value, kv, layer, meta, **options)
    here = AttentionMeta(**{name: _here(getattr(meta, name)) for name in INDICES})
    options["sinks"] = _here(options.get("sinks"))
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    attended = tree_attention(_here(query), _here(key), _here(value), opened(kv), layer, here, **options)
    opened(out).copy_(attended)
    return out


def _here(given: Any) -> Any:
    return opened(given.contiguous()) if isinstance(given, torch.Tensor) else given
