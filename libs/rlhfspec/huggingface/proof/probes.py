"""Probes at positions where a model may change its behaviour, preceded by random keys and values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhfspec.huggingface.structure.attention import AttentionSpec
from rlhfspec.huggingface.structure.causal_lm import Anatomy

_LENGTHS = (33, 5)  # of prompts: longer than two blocks of keys, and shorter than one
_FAR_TOKENS = 9
_BEFORE = 4  # tokens of a far probe before the place itself
_SCATTERED_PLACES, _AT_A_PLACE = 8, 4  # tokens of a scattered probe


@dataclass(frozen=True, slots=True)
class Probe:
    past: int
    tokens: tuple[int, ...]

    @property
    def length(self) -> int:
        return self.past + len(self.tokens)

    @property
    def positions(self) -> tuple[int, ...]:
        return tuple(range(self.past, self.length))

    @property
    def num_random(self) -> int:
        return self.past

    def __str__(self) -> str:
        return f"{len(self.tokens)} tokens" + (f" behind {self.past} positions" if self.past else "")


@dataclass(frozen=True, slots=True)
class Scattered(Probe):
    """Probe without preceding KV, whose positions have gaps."""

    at: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        return self.at

    @property
    def num_random(self) -> int:
        """Return the number of leading tokens with random keys, half; the unrotated others expose wrong rotations."""
        return len(self.at) // 2

    def __str__(self) -> str:
        return f"{len(self.tokens)} tokens up to position {self.at[-1]}"


def choose(anatomy: Anatomy, config: Any, max_context: int, num_token_ids: int) -> tuple[Probe, ...]:
    """Return probes at the start and near window, chunk, RoPE and context limits. `num_token_ids`: embedding rows."""
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


def choose_without_cache(anatomy: Anatomy, config: Any, max_context: int, num_token_ids: int) -> tuple[Probe, ...]:
    near = tuple(probe for probe in choose(anatomy, config, max_context, num_token_ids) if not probe.past)
    if max_context <= _LENGTHS[0]:
        return near
    at = _scattered_positions(max_context)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(num_token_ids, (len(at),), generator=generator).tolist()
    return (*near, Scattered(past=0, tokens=tuple(tokens), at=at))


def _scattered_positions(max_context: int) -> tuple[int, ...]:
    """Return groups of positions at geometric distances from the beginning to the end.

    >>> _scattered_positions(4096)[:10], _scattered_positions(4096)[-5:]
    ((0, 1, 2, 3, 7, 8, 9, 10, 25, 26), (1521, 4092, 4093, 4094, 4095))
    """
    steps = [step / (_SCATTERED_PLACES - 1) for step in range(_SCATTERED_PLACES)]
    ends = [round(_AT_A_PLACE * (max_context / _AT_A_PLACE) ** step) for step in steps]
    return tuple(sorted({end - back for end in ends for back in range(1, _AT_A_PLACE + 1)}))


def _places(anatomy: Anatomy, config: Any) -> Iterator[int]:
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
    """Return random keys [1, Hkv, past, Dk] and values [1, Hkv, past, Dv], exactly representable in bfloat16."""
    generator = torch.Generator().manual_seed(1 + spec.index)
    shape = (1, spec.num_kv_heads, past)
    keys, values = (torch.randn(*shape, dim, generator=generator) for dim in (spec.key_dim, spec.value_dim))
    return keys.bfloat16().float(), values.bfloat16().float()
