"""Activation checkpointing: layers keep only their input and rerun in the backward pass."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from rlhfspec.huggingface.structure.layers import layers_of
from rlhfspec.training.modeling.lean import whole_layers
from rlhfspec.training.modeling.one_call import RowPart
from rlhfspec.training.modeling.packed import forward_layout, hidden_states, layout_now, pack_sequences, spec_of

_SHORT, _LONG = 32, 64  # tokens of the test rows


def recompute(trunk: nn.Module) -> None:
    for layer in layers_of(trunk):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=same_row)


def same_row() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return checkpoint contexts. The rerun's restores the row layout, because it may run in another thread."""
    return whole_layers(), _again(layout_now())


@contextmanager
def _again(layout: tuple[RowPart, ...] | None) -> Iterator[None]:
    with whole_layers(), forward_layout(layout):
        yield


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
    """Return the bytes that a forward keeps for its backward pass, without parameters."""
    torch.clear_autocast_cache()  # so that every run makes its copies of weights
    with torch.enable_grad(), _Made() as made:
        result = run()
    alive = (storage for reference in made.storages.values() if (storage := reference()) is not None)
    kept: int = sum(storage.nbytes() for storage in alive)
    del result
    return kept


class _Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Storages that operations of this context made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves(args) if isinstance(tensor, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in given:
                self.storages[storage._cdata] = weakref.ref(storage)
        return result
