"""What a model is asked before it is used: a few tokens at every place where a model may behave in another way.

At the beginning, behind every window and chunk that its attentions showed, behind the original length of its RoPE
scaling, and at the end of the context. What lies before a far place is random keys and values, put in at the
attention interface: so the last position of a long context costs a forward of a few tokens. `expected` is plain
Hugging Face in eager mode.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.attention import AttentionSpec, attending
from rlhfspec.huggingface.causal_lm import Anatomy, text_config
from rlhfspec.huggingface.guard import WeightProducts
from rlhfspec.huggingface.past import past_of
from rlhfspec.huggingface.trace import FORWARD_ERRORS, first_line

_REFERENCE = "rlhfspec_reference"
_LENGTHS = (33, 5)  # of prompts: longer than two blocks of keys, and shorter than one
_FAR_TOKENS = 9
_NEAR_TIE = 0.05  # between the scores of two experts, in parts of the larger
_BEFORE = 4  # so many tokens of a far probe stand before the place itself


@dataclass(frozen=True, slots=True)
class Probe:
    """So many positions lie behind; these tokens come now."""

    past: int
    tokens: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.past + len(self.tokens)

    def __str__(self) -> str:
        return f"{len(self.tokens)} tokens" + (f" behind {self.past} positions" if self.past else "")


def choose(anatomy: Anatomy, config: Any, max_context: int, num_token_ids: int) -> tuple[Probe, ...]:
    """The probes of a model. num_token_ids: how many its embedding has."""
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(num_token_ids, (count,), generator=generator).tolist())

    near = [Probe(0, tokens(min(length, max_context))) for length in _LENGTHS]
    places = sorted({*_places(anatomy, config), max_context - (_FAR_TOKENS - _BEFORE)})
    far = [
        Probe(place - _BEFORE, tokens(_FAR_TOKENS))
        for place in places
        if place > _BEFORE and place + _FAR_TOKENS - _BEFORE <= max_context
    ]
    return (*near, *far)


def _places(anatomy: Anatomy, config: Any) -> Iterator[int]:
    """Positions around which something may change."""
    for spec in anatomy.attentions:
        yield from (place for place in (spec.window, spec.chunk) if place is not None)
    yield from _numbers(config.to_dict(), "original_max_position_embeddings")


def _numbers(content: Any, wanted: str) -> Iterator[int]:
    if isinstance(content, dict):
        for name, value in content.items():
            if name == wanted and isinstance(value, (int, float)):
                yield int(value)
            yield from _numbers(value, wanted)


def random_past(spec: AttentionSpec, past: int) -> tuple[Tensor, Tensor]:
    """Keys [1, Hkv, past, Dk] and values [1, Hkv, past, Dv] of an attention, exact in bfloat16 too."""
    generator = torch.Generator().manual_seed(1 + spec.index)
    shape = (1, spec.num_kv_heads, past)
    keys, values = (torch.randn(*shape, dim, generator=generator) for dim in (spec.key_dim, spec.value_dim))
    return keys.bfloat16().float(), values.bfloat16().float()


class Rounding(WeightProducts):
    """How the engine's numbers are rounded, for a reference that rounds at the same places.

    Weights and cached keys and values are kept as `dtype`; some arithmetics read activations as bfloat16.
    """

    def __init__(self, model: Any, *, dtype: torch.dtype, arithmetic: str) -> None:
        """The model's parameters hold rounded values already (`round_parameters`)."""
        super().__init__()
        self.dtype = dtype
        self._rounds_rows = arithmetic in ("amx", "dpbf16")
        self.know(model.parameters())

    def product(self, rows: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(rounded(rows, torch.bfloat16) if self._rounds_rows else rows, weight)

    def kept(self, states: Tensor) -> Tensor:
        return rounded(states, torch.bfloat16) if self.dtype == torch.bfloat16 else states


def round_parameters(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """In place, to what `dtype` can hold; returns what they were, by their names, where that is something else."""
    before = {}
    if dtype == torch.bfloat16:
        for name, parameter in model.named_parameters():
            before[name] = parameter.data
            parameter.data = rounded(parameter.data, dtype)
    return before


def rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The value as `dtype` keeps it, in float32 (float64 where that is what is kept)."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.to(torch.float64) if dtype == torch.float64 else tensor.to(dtype).to(torch.float32)


_CHOOSING = (torch.topk, Tensor.topk, torch.max, Tensor.max)


class Choices(TorchFunctionMode):
    """Hears which experts a forward chooses for its rows: what `topk` and `max` return.

    A choice between two that are nearly equal may go either way with rounding, and what follows it is another number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Tensor, Tensor]] = []  # values and indices [rows, k] of every call

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CHOOSING and isinstance(result, tuple) and result[1].ndim == 2:
            self.made.append((result[0].detach().float().cpu(), result[1].detach().cpu()))
        return result


@dataclass(frozen=True, slots=True)
class Answer:
    """What a probe gave."""

    logits: Tensor  # [tokens, vocab]
    choices: list[tuple[Tensor, Tensor]]  # values and indices, [tokens, k] of every mixture of experts

    def num_comparable(self, other: Answer) -> int:
        """How many leading rows chose the same experts in both; where they part, it must have been a near tie."""
        rows = len(self.logits)
        for (values, indices), (their_values, their_indices) in zip(self.choices, other.choices, strict=False):
            if indices.shape != their_indices.shape or len(indices) != len(self.logits):
                continue
            parted = (indices.sort(1).values != their_indices.sort(1).values).any(1).nonzero().flatten().tolist()
            if parted and parted[0] < rows:
                gap = (values[parted[0]] - their_values[parted[0]]).abs().max() / values[parted[0]].abs().max()
                rows = parted[0] if gap < _NEAR_TIE else rows
        return rows


@torch.inference_mode()
def expected(model: Any, anatomy: Anatomy, probe: Probe, *, name: str, rounding: Rounding) -> Answer:
    """What plain Hugging Face gives in eager mode. Raises UnsupportedModel."""
    past = past_of(probe.past, len(anatomy.attentions) + getattr(text_config(model), "num_hidden_layers", 0))
    rounds = rounding.dtype == torch.bfloat16
    function = _Eager(anatomy.attentions, probe.past, rounding).attend if probe.past or rounds else None
    attention = attending(model, "eager" if function is None else _REFERENCE, function, masks=function is not None)
    try:
        with attention, Choices() as choices, rounding if rounds else nullcontext():
            logits = model(input_ids=torch.tensor([probe.tokens]), **past).logits
    except FORWARD_ERRORS as error:
        if isinstance(error, UnsupportedModel):
            raise
        problem = f"Hugging Face itself fails on {probe}: {first_line(error)}"
        raise UnsupportedModel(name, type(model).__name__, problem) from error
    return Answer(logits[0].float(), choices.made)


class _Eager:
    """The model's own eager attention over a past that is random instead of zero, rounded as the engine keeps it."""

    def __init__(self, specs: tuple[AttentionSpec, ...], past: int, rounding: Rounding) -> None:
        self.coming = iter(specs)
        self.past = past
        self.rounding = rounding

    def attend(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **keywords: Any
    ) -> Any:
        keys, values = random_past(next(self.coming), self.past)
        key = self.rounding.kept(torch.cat([keys, key[:, :, self.past :]], dim=2))
        value = self.rounding.kept(torch.cat([values, value[:, :, self.past :]], dim=2))
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, attention_mask, **keywords)
