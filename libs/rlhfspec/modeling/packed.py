"""Many sequences in one row, without padding: each attends to itself only, and its positions start at 0.

    tokens     p p p r r r | p p r r r r r       prompt, response; a response's last token is never run: it predicts
    positions  0 1 2 3 4 5 | 0 1 2 3 4 5 6       nothing
    predicting     ^ ^ ^ ^ |   ^ ^ ^ ^ ^         rows whose output says something about a response token

Any Hugging Face model that `rlhfspec.huggingface` has examined runs such rows unmodified: `use_packed_attention`
names our attention function, and `forward_layout` tells it where sequences end.

Example:
    >>> batch = pack_sequences([(5, 6, 7), (8,)], [(1, 2), (3, 4, 9)])
    >>> batch.token_ids.tolist(), batch.position_ids.tolist()
    ([[5, 6, 7, 1, 8, 3, 4]], [[0, 1, 2, 3, 0, 1, 2]])
    >>> batch.lengths, batch.predicting.tolist(), batch.targets.tolist()
    ((4, 3), [2, 3, 4, 5, 6], [1, 2, 3, 4, 9])
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from rlhfspec.huggingface.attention import AttentionSpec, refuse_unknown, visible
from rlhfspec.huggingface.causal_lm import run_trunk

ATTENTION_NAME = "rlhfspec_packed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """T tokens of whole sequences in one row, t of them followed by a response token."""

    token_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    lengths: tuple[int, ...]  # of the sequences; T together
    predicting: torch.Tensor  # [t] places in the row
    targets: torch.Tensor  # [t] the response tokens, sequence by sequence

    def to(self, device: torch.device) -> Packed:
        return Packed(
            token_ids=self.token_ids.to(device),
            position_ids=self.position_ids.to(device),
            lengths=self.lengths,
            predicting=self.predicting.to(device),
            targets=self.targets.to(device),
        )


def pack_sequences(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> Packed:
    """Prompts and responses of one or more tokens each, in the order given."""
    token_ids: list[int] = []
    predicting: list[int] = []
    lengths: list[int] = []
    for prompt, response in zip(prompts, responses, strict=True):
        assert min(len(prompt), len(response)) > 0, "a packed sequence has a prompt and a response"
        first = len(token_ids) + len(prompt) - 1
        predicting.extend(range(first, first + len(response)))
        token_ids.extend((*prompt, *response[:-1]))
        lengths.append(len(prompt) + len(response) - 1)
    return Packed(
        token_ids=torch.tensor([token_ids]),
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        lengths=tuple(lengths),
        predicting=torch.tensor(predicting),
        targets=torch.tensor([token for response in responses for token in response]),
    )


def use_packed_attention(model: Any) -> None:
    """From now on the model's attention takes packed rows only."""
    AttentionInterface.register(ATTENTION_NAME, attend)
    model.set_attn_implementation(ATTENTION_NAME)


@dataclass(slots=True)
class RowLayout:
    """Where the sequences of a packed row end, and which attention of the forward comes next."""

    lengths: tuple[int, ...]
    coming: Iterator[AttentionSpec]


_layout: ContextVar[RowLayout | None] = ContextVar("layout of the packed row that runs in this thread", default=None)


@contextmanager
def forward_layout(lengths: tuple[int, ...], attentions: tuple[AttentionSpec, ...]) -> Iterator[None]:
    """How the row is laid out that runs inside, once; each thread has its own."""
    token = _layout.set(RowLayout(lengths, iter(attentions)))
    try:
        yield
    finally:
        _layout.reset(token)


def hidden_states(trunk: Any, attentions: tuple[AttentionSpec, ...], batch: Packed) -> torch.Tensor:
    """The trunk's output for the rows that predict. Returns [t, hidden]."""
    with forward_layout(batch.lengths, attentions):
        output = run_trunk(trunk, batch.token_ids, batch.position_ids)
    return output[0].index_select(0, batch.predicting)


def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
           scaling: float | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
           dropout: float = 0.0, **keywords: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The attention function transformers calls in every layer. query [1, H, T, D], key/value [1, Hkv, T, D]."""
    refuse_unknown(module, keywords)
    layout = _layout.get()
    assert layout is not None, "packed attention outside of forward_layout"
    assert not dropout, "attention dropout is off: log-probs of one policy are compared"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return row_attention(query, key, value, layout.lengths, next(layout.coming), scale, softcap or 0.0, s_aux), None


def row_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...], spec: AttentionSpec,
    scale: float, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Each sequence of a packed row over itself. query [1, H, T, Dk], key/value [1, Hkv, T, .] -> [1, T, H, Dv]."""
    # split, not slices: its backward is one concatenation instead of a full-size tensor of zeros a sequence
    segments = zip(*(torch.split(tensor, list(lengths), dim=2) for tensor in (query, key, value)), strict=True)
    if softcap or sinks is not None:
        out = [explicit_attention(q, k, v, scale, spec, softcap, sinks) for q, k, v in segments]
    else:
        out = [_sdpa(q, k, v, scale, spec) for q, k, v in segments]
    return torch.cat(out, dim=2).transpose(1, 2).contiguous()


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, spec: AttentionSpec
) -> torch.Tensor:
    """One sequence: query [1, H, N, Dk], key/value [1, Hkv, N, .] -> [1, H, N, Dv]."""
    size = query.shape[2]
    narrowed = min(spec.window or size, spec.chunk or size) < size
    mask = visible(size, spec, query.device) if narrowed else None
    grouped = query.shape[1] != key.shape[1]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    spec: AttentionSpec,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """The same written out, with what fused attention lacks: a soft cap on scores, and sinks [H]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    scores = (query @ key.transpose(2, 3)).float() * scale  # [1, H, N, N]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible(query.shape[2], spec, query.device), float("-inf"))
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(1, -1, query.shape[2], 1)
        scores = torch.cat([scores, column], dim=3)
    weights = scores.softmax(dim=3)[..., : query.shape[2]]
    return weights.to(value.dtype) @ value
