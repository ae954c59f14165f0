"""Activation checkpointing: layers keep only their input and rerun in the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhfspec.huggingface.structure.layers import layers_of
from rlhfspec.training.modeling.gated import keep_all_of_mlps
from rlhfspec.training.modeling.packed import forward_layout, hidden_states, layout_now, pack_sequences, spec_of

_SHORT, _LONG = 32, 64  # tokens of the test rows


def recompute(trunk: nn.Module) -> None:
    keep_all_of_mlps(trunk)
    for layer in layers_of(trunk):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=same_row)


def same_row() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return checkpoint contexts. The rerun's restores the row layout, because it may run in another thread."""
    return nullcontext(), forward_layout(layout_now())


def activation_bytes(trunk: nn.Module, num_tokens: int) -> int | None:
    """Estimate the trunk's activation bytes in a row of tokens; None if they grow faster than linearly."""
    specs = filter(None, map(spec_of, trunk.modules()))
    if any(spec.softcap or spec.has_sinks for spec in specs):
        return None
    short, long = (_bytes_of_row(trunk, length) for length in (_SHORT, _LONG))
    return short + (long - short) * (num_tokens - _SHORT) // (_LONG - _SHORT)


def _bytes_of_row(trunk: nn.Module, num_tokens: int) -> int:
    row = pack_sequences([[0] * (num_tokens - 1)], [[0, 0]])
    return bytes_kept(lambda: hidden_states(trunk, row))


def bytes_kept(run: Callable[[], Any]) -> int:
    """Return the bytes that a forward saves for its backward pass, without parameters."""
    kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no other storage reuses the address

    def count(tensor: torch.Tensor) -> None:
        """Record a saved tensor's storage, not the tensor, because its graph would keep all weights alive."""
        storage = tensor.untyped_storage()
        if not (tensor.is_leaf and tensor.requires_grad):
            kept[storage.data_ptr()] = storage

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda nothing: nothing):
        run()
    return sum(storage.nbytes() for storage in kept.values())
