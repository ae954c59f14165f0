"""Activation checkpointing: of a layer only its input is kept, and the backward pass computes the rest again.

It is the same computation in the same order, so gradients are the same bits; a layer's forward runs twice. Whether it
is needed is told before the first step: a model's forward keeps so many bytes, and so many more with every token, which
two short rows show (`activation_bytes`).

Example:
    >>> from rlhfspec.training.modeling.loading import prepared
    >>> from rlhfspec.tiny import random_model
    >>> trunk = prepared(random_model("llama", seed=0)).model
    >>> activation_bytes(trunk, 4096) > 4096 * 1000
    True
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rlhfspec.huggingface.structure.layers import layers_of
from rlhfspec.training.modeling.packed import forward_layout, hidden_states, layout_now, pack_sequences, spec_of

_SHORT, _LONG = 32, 64  # tokens of the rows that are tried


def recompute(trunk: nn.Module) -> None:
    """From now on the trunk's layers keep their input only."""
    for layer in layers_of(trunk):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=same_row)


def same_row() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """For torch's checkpoint: what a forward runs in, and what its repetition runs in, maybe in another thread."""
    return nullcontext(), forward_layout(layout_now())


def activation_bytes(trunk: nn.Module, num_tokens: int) -> int | None:
    """What a row of so many tokens keeps in the trunk for the backward pass; None: more than tokens times a number,
    since scores with a soft cap or sinks are written out."""
    specs = filter(None, map(spec_of, trunk.modules()))
    if any(spec.softcap or spec.has_sinks for spec in specs):
        return None
    short, long = (_bytes_of_row(trunk, length) for length in (_SHORT, _LONG))
    return short + (long - short) * (num_tokens - _SHORT) // (_LONG - _SHORT)


def _bytes_of_row(trunk: nn.Module, num_tokens: int) -> int:
    row = pack_sequences([[0] * (num_tokens - 1)], [[0, 0]])
    return bytes_kept(lambda: hidden_states(trunk, row))


def bytes_kept(run: Callable[[], Any]) -> int:
    """Bytes that a forward keeps for its backward pass, but for what is there without it."""
    kept: dict[int, torch.UntypedStorage] = {}  # alive, so that no other takes its address

    def count(tensor: torch.Tensor) -> None:
        """Not the tensor: an output that its own graph held would hold the graph, and all weights, for ever."""
        storage = tensor.untyped_storage()
        if not (tensor.is_leaf and tensor.requires_grad):
            kept[storage.data_ptr()] = storage

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(count, lambda nothing: nothing):
        run()
    return sum(storage.nbytes() for storage in kept.values())
