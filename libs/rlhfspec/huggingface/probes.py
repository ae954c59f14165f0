"""What a model is asked before it is used: a few tokens at every place where a model may behave in another way.

At the beginning, behind every window and chunk that its attentions showed, behind the original length of its RoPE
scaling, and at the end of the context. What lies before a far place is random keys and values, put in at the
attention interface: so the last position of a long context costs a forward of a few tokens. `reference.py` knows the
right answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhfspec.huggingface.attention import AttentionSpec
from rlhfspec.huggingface.causal_lm import Anatomy

_LENGTHS = (33, 5)  # of prompts: longer than two blocks of keys, and shorter than one
_FAR_TOKENS = 9
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
