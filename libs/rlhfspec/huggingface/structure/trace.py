"""Trace of a forward: arguments of attentions, inputs and outputs of modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlhfspec.errors import UnsupportedModel, first_line
from rlhfspec.huggingface.structure.attention import refuse_unknown
from rlhfspec.huggingface.structure.causal_lm import hidden_of

FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError)


@dataclass(slots=True)
class TracedAttention:
    kind: str  # the module's class
    path: str
    shape: tuple[int, int, int, int]  # heads, KV heads, key size, value size
    scale: float
    softcap: float
    has_sinks: bool
    starts: tuple[int, ...]  # first visible position of every query
    first_query: int  # position of the first query

    @property
    def rows(self) -> list[tuple[int, int]]:
        return [(self.first_query + place, start) for place, start in enumerate(self.starts)]


Tensors = tuple[torch.Tensor, ...]


class ForwardTrace:
    def __init__(self, model: Any, name: str, num_tokens: int, past: int) -> None:
        self.name = name
        self.num_tokens = num_tokens
        self.past = past  # number of tokens before those
        self.attentions: list[TracedAttention] = []
        self.modules: list[tuple[str, Tensors, Tensors]] = []  # path, inputs, outputs; inner modules first;
        # attentions also with their arguments to the interface
        self.rotary: list[tuple[str, nn.Module, Any, Any]] = []  # path, module and arguments of every rotary embedding
        self.trunk = ""
        self.trunk_output: type = tuple
        self.width = 0
        self.vocab_size = 0
        self._paths = {module: path for path, module in model.named_modules()}
        self._stack: list[tuple[str, Tensors]] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        handles = []
        for module in model.modules():
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stack.append((self._paths[module], tuple(tensors((*args, *kwargs.values())))))
        if type(module).__name__.endswith("RotaryEmbedding"):
            self.rotary.append((self._paths[module], module, args, kwargs))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        path, inputs = self._stack.pop()
        self.modules.append((path, inputs, tuple(tensors(output))))
        if path and path == self.trunk:
            self.trunk_output = type(output)
            self.width = hidden_of(output).shape[-1]

    def attend(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
               scaling: float | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
               **keywords: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Record the attention and return each token's own value, unmixed."""
        refuse_unknown(module, keywords, name=self.name)
        kind, num_queries, num_keys = type(module).__name__, query.shape[2], key.shape[2]
        if (num_queries, num_keys) != (self.num_tokens, self.past + self.num_tokens):
            tokens = f"{self.num_tokens} tokens" + (f" behind {self.past}" if self.past else "")
            problem = f"attends with {num_queries} queries to {num_keys} keys where there are {tokens}"
            raise UnsupportedModel(self.name, kind, problem)
        self.trunk = self.trunk or self._stack[1][0]
        if self._stack[1][0] != self.trunk:
            raise UnsupportedModel(self.name, kind, f"attention both in {self.trunk} and in {self._stack[1][0]}")
        self.attentions.append(
            TracedAttention(
                kind=kind,
                path=self._paths[module],
                shape=(query.shape[1], key.shape[1], key.shape[3], value.shape[3]),
                scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
                softcap=float(softcap or 0.0),
                has_sinks=s_aux is not None,
                starts=_first_seen(self.name, kind, attention_mask, num_queries, num_keys),
                first_query=num_keys - num_queries,
            )
        )
        own = value[:, :, self.past :]  # [1, Hkv, N, D]
        path, inputs = self._stack[-1]
        self.modules.append((path, inputs, (query, key[:, :, self.past :], own)))
        return own.repeat_interleave(query.shape[1] // key.shape[1], dim=1).transpose(1, 2).contiguous(), None


def _first_seen(name: str, kind: str, mask: Any, num_queries: int, num_keys: int) -> tuple[int, ...]:
    """Return the first visible position of each query. Raise unless visibility is causal without gaps."""
    if mask is None:
        raise UnsupportedModel(name, kind, "attention is not causal (some decoders need is_decoder: true)")
    visible, says_more = _visible(mask[..., :num_keys])
    if says_more:
        raise UnsupportedModel(name, kind, "adds a bias to attention scores through the mask")
    if visible.shape[-2:] != (num_queries, num_keys) or not (visible == visible[:1, :1]).all():
        raise UnsupportedModel(name, kind, f"uses an unsupported attention mask of shape {tuple(mask.shape)}")
    rows = visible[0, 0]  # [N, keys]
    place = torch.arange(num_keys)
    own = place[num_keys - num_queries :, None]
    if (rows & (place > own)).any():
        raise UnsupportedModel(name, kind, "attention is not causal (some decoders need is_decoder: true)")
    starts = torch.where(rows, place, num_keys).amin(dim=1)
    if not torch.equal(rows, (place >= starts[:, None]) & (place <= own)):
        raise UnsupportedModel(name, kind, "attention with gaps between the tokens that are seen")
    return tuple(starts.tolist())


def _visible(mask: torch.Tensor) -> tuple[torch.Tensor, bool]:
    if mask.dtype == torch.bool:
        return mask, False
    hidden = mask <= torch.finfo(mask.dtype).min / 2
    return ~hidden, not bool(((mask == 0) | hidden).all())


def first_that_differs(one: ForwardTrace, other: ForwardTrace, places: torch.Tensor, first: int = 0) -> str | None:
    """Return the path of the first module whose inputs agree in both traces but whose outputs differ, or None.

    `other` ran the tokens of `one` at `places`, of which those before `first` are ignored.
    """
    calls: dict[str, list[tuple[Tensors, Tensors]]] = {}
    for path, inputs, outputs in other.modules:
        calls.setdefault(path, []).append((inputs, outputs))
    for path, inputs, outputs in one.modules:
        if not calls.get(path):
            continue
        their_inputs, their_outputs = calls[path].pop(0)
        same_inputs = same_tokens(inputs, their_inputs, places, one.num_tokens, first)
        if inputs and same_inputs is None:
            continue
        if same_inputs is not False and same_tokens(outputs, their_outputs, places, one.num_tokens, first) is False:
            return path
    return None


def same_tokens(these: Tensors, those: Tensors, places: torch.Tensor, num_tokens: int, first: int) -> bool | None:
    """Return whether `these` at `places` equal `those`, from `first` on. None: no tensor has a token axis."""
    found = None
    for this, that in zip(these, those, strict=False):
        axis = _token_axis(this.shape, that.shape, num_tokens, len(places))
        if axis is None:
            continue
        size = len(places) - first
        a, b = this.index_select(axis, places).narrow(axis, first, size), that.narrow(axis, first, size)
        if not _close(a, b):
            return False
        found = True
    return found


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.is_floating_point():
        return torch.equal(a, b)
    atol = 1e-4 * float(a.abs().nan_to_num().max())
    return torch.allclose(a.float(), b.float(), rtol=1e-4, atol=atol, equal_nan=True)


def _token_axis(this: torch.Size, that: torch.Size, num_tokens: int, num_others: int) -> int | None:
    if len(this) != len(that):
        return None
    axes = [axis for axis, sizes in enumerate(zip(this, that, strict=True)) if sizes == (num_tokens, num_others)]
    rest = all(a == b for axis, (a, b) in enumerate(zip(this, that, strict=True)) if axis not in axes)
    return axes[0] if len(axes) == 1 and rest else None


def tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from tensors(tuple(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors(value)


@contextmanager
def refusing(name: str, kind: str, problem: str) -> Iterator[None]:
    """Turn an error of the model's own code into UnsupportedModel."""
    try:
        yield
    except UnsupportedModel:
        raise
    except FORWARD_ERRORS as error:
        raise UnsupportedModel(name, kind, f"{problem}: {first_line(error)}") from error
