"""Packed rows: sequences in one row without padding, each with its own attention and positions.

    tokens     ppprrr|pprrrrr     prompt, response; a response's last token is never run
    positions  012345|0123456
    predicting   ^^^^| ^^^^^^     tokens whose output predicts a response token

Neighbours may share a prompt; each answer attends to the prompt and to itself:

    tokens     ppppp|rrr|rr|rrr   one prompt, three answers
    positions  01234|567|56|567
    predicting     ^|^^^|^^|^^^   the prompt's last token predicts the first token of every answer
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from rlhfspec.common.context import holding
from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.structure.attention import AttentionSpec, refuse_unknown, visible
from rlhfspec.huggingface.structure.causal_lm import anatomy_of, run_trunk
from rlhfspec.training.modeling import one_call
from rlhfspec.training.modeling.lean import made_again
from rlhfspec.training.modeling.one_call import RowPart

_PACKED_ATTENTION = "rlhfspec_packed"
_SPEC = "rlhfspec_attention"  # on an attention module: its AttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    token_ids: torch.Tensor  # [1, T]
    position_ids: torch.Tensor  # [1, T]
    parts: tuple[RowPart, ...]  # T tokens together
    predicting: torch.Tensor  # [t] places in the row; a shared prompt's last place repeats for each answer
    targets: torch.Tensor  # [t] the response tokens, sequence by sequence

    @property
    def lengths(self) -> tuple[int, ...]:
        return tuple(part.length for part in self.parts)

    def to(self, device: torch.device) -> PackedRow:
        return PackedRow(
            token_ids=self.token_ids.to(device),
            position_ids=self.position_ids.to(device),
            parts=self.parts,
            predicting=self.predicting.to(device),
            targets=self.targets.to(device),
        )


def pack_sequences(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], *, share_prompts: bool = False
) -> PackedRow:
    """Pack prompts and responses in order. share_prompts: store equal neighbouring prompts once."""
    row = _RowWriter()
    for prompt, answers in _groups(zip(map(tuple, prompts), responses, strict=True), share_prompts):
        row.add_group(prompt, answers)
    return PackedRow(
        token_ids=torch.tensor([row.token_ids]),
        position_ids=torch.tensor([row.position_ids]),
        parts=tuple(row.parts),
        predicting=torch.tensor(row.predicting),
        targets=torch.tensor([token for response in responses for token in response]),
    )


def _groups(
    pairs: Iterable[tuple[tuple[int, ...], Sequence[int]]], share_prompts: bool
) -> Iterator[tuple[tuple[int, ...], list[Sequence[int]]]]:
    if not share_prompts:
        yield from ((prompt, [answer]) for prompt, answer in pairs)
        return
    for prompt, group in groupby(pairs, key=lambda pair: pair[0]):
        yield prompt, [answer for _, answer in group]


@dataclass(slots=True)
class _RowWriter:
    token_ids: list[int] = field(default_factory=list)
    position_ids: list[int] = field(default_factory=list)
    parts: list[RowPart] = field(default_factory=list)
    predicting: list[int] = field(default_factory=list)

    def add_group(self, prompt: tuple[int, ...], answers: list[Sequence[int]]) -> None:
        assert min(map(len, (prompt, *answers))) > 0, "a packed sequence has a prompt and a response"
        if len(answers) == 1:
            last = self._add((*prompt, *answers[0][:-1])) + len(prompt) - 1
            self.predicting.extend(range(last, last + len(answers[0])))
            return
        last, shared = self._add(prompt) + len(prompt) - 1, len(self.parts) - 1
        for answer in answers:
            start = self._add(answer[:-1], behind=shared)
            self.predicting.extend((last, *range(start, start + len(answer) - 1)))

    def _add(self, tokens: Sequence[int], *, behind: int | None = None) -> int:
        """Add tokens as a part (behind: index of its prompt's part) unless empty. Return the first token's index."""
        start = len(self.token_ids)
        if tokens:
            first = 0 if behind is None else self.parts[behind].length
            self.token_ids.extend(tokens)
            self.position_ids.extend(range(first, first + len(tokens)))
            self.parts.append(RowPart(len(tokens), behind))
        return start


def use_packed_attention(model: Any) -> None:
    first: dict[str, AttentionSpec] = {}
    for spec in anatomy_of(model).attentions:
        module, seen = model.get_submodule(spec.path), first.setdefault(spec.path, spec)
        if (seen.window, seen.chunk) != (spec.window, spec.chunk):
            raise UnsupportedModel("model", type(module).__name__, "attention that runs twice with different windows")
        keep_spec(module, spec)
    AttentionInterface.register(_PACKED_ATTENTION, attend)
    model.set_attn_implementation(_PACKED_ATTENTION)


def keep_spec(module: Any, spec: AttentionSpec) -> None:
    """Store the spec on the module, where recomputation in the backward pass finds it."""
    setattr(module, _SPEC, spec)


def spec_of(module: Any) -> AttentionSpec | None:
    return getattr(module, _SPEC, None)


_layout: ContextVar[tuple[RowPart, ...] | None] = ContextVar("parts of the row that runs in this thread", default=None)


def layout_now() -> tuple[RowPart, ...] | None:
    return _layout.get()


def forward_layout(parts: tuple[RowPart, ...] | None) -> AbstractContextManager[None]:
    """Treat packed rows as divided into `parts` in forwards of this context and thread."""
    return holding(_layout, parts)


def hidden_states(trunk: Any, batch: PackedRow) -> torch.Tensor:
    """Return the trunk's output [t, hidden] at the positions that predict response tokens."""
    with forward_layout(batch.parts):
        output = run_trunk(trunk, batch.token_ids, batch.position_ids)
    # embedding's backward adds up a row's gradients in order; index_select's on a GPU does not
    return functional.embedding(batch.predicting, output[0])


def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
           scaling: float | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
           dropout: float = 0.0, **keywords: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute attention for transformers: query [1, H, T, D], key/value [1, Hkv, T, D]."""
    refuse_unknown(module, keywords)
    parts = _layout.get()
    assert parts is not None, "packed attention outside of forward_layout"
    assert not dropout, "attention dropout is off: log-probs of one policy are compared"
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return row_attention(query, key, value, parts, getattr(module, _SPEC), scale, softcap or 0.0, s_aux), None


def row_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: tuple[RowPart, ...], spec: AttentionSpec,
    scale: float, softcap: float, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Compute attention sequence by sequence: query [1, H, T, Dk], key/value [1, Hkv, T, .] -> [1, T, H, Dv]."""
    if not softcap and sinks is None and one_call.takes(query, key, value, spec, _by_parts):
        return one_call.attention(query, key, value, parts, spec, scale)
    return _by_parts(query, key, value, parts, spec, scale, softcap, sinks)


def _by_parts(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, parts: tuple[RowPart, ...], spec: AttentionSpec,
    scale: float, softcap: float = 0.0, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    # split's backward is one concatenation; slices would make a full-size tensor of zeros per sequence
    lengths = [part.length for part in parts]
    queries, keys, values = (torch.split(tensor, lengths, dim=2) for tensor in (query, key, value))
    out = []
    for q, k, v, part in zip(queries, keys, values, parts, strict=True):
        makers: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
        if part.behind is not None:  # the prompt's keys and values are kept once, and not with every answer
            k, v = (_joined(states[part.behind], own, makers) for states, own in ((keys, k), (values, v)))
        with made_again(*makers):
            if softcap or sinks is not None:
                out.append(explicit_attention(q, k, v, scale, spec, softcap, sinks))
            else:
                out.append(_sdpa(q, k, v, scale, spec))
    return torch.cat(out, dim=2).transpose(1, 2).contiguous()


def _joined(
    before: torch.Tensor, own: torch.Tensor, makers: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]]
) -> torch.Tensor:
    parts = [before.detach(), own.detach()]
    makers.append((joined := torch.cat([before, own], dim=2), lambda: torch.cat(parts, dim=2)))
    return joined


def _sdpa(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, spec: AttentionSpec
) -> torch.Tensor:
    """Attend from a sequence's last N of M tokens: query [1, H, N, Dk], key/value [1, Hkv, M, .] -> [1, H, N, Dv]."""
    count, size = query.shape[2], key.shape[2]
    narrowed = min(spec.window or size, spec.chunk or size) < size
    mask = visible(size, spec, query.device, last=count) if narrowed or count < size else None
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(
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
    """Compute `_sdpa` unfused, with a soft cap on scores and with sinks [H]."""
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    count, size = query.shape[2], key.shape[2]
    scores = (query @ key.transpose(2, 3)).float() * scale  # [1, H, N, M]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible(size, spec, query.device, last=count), float("-inf"))
    if sinks is not None:
        column = sinks.float()[None, :, None, None].expand(1, -1, count, 1)
        scores = torch.cat([scores, column], dim=3)
    weights = scores.softmax(dim=3)[..., :size]
    return weights.to(value.dtype) @ value
