"""Anatomy of a causal LM: the trunk up to hidden states, its attentions, and the head.

The engine batches sequences into one row, so `examine` refuses modules that mix tokens outside `AttentionInterface`, or
take positions from anything but `position_ids`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlhfspec.errors import UnsupportedModel
from rlhfspec.huggingface.fused.widened import one_layer_wide
from rlhfspec.huggingface.structure.attention import AttentionSpec, attending
from rlhfspec.huggingface.structure.causal_lm import Anatomy, keep_anatomy, within_positions
from rlhfspec.huggingface.structure.past import past_of
from rlhfspec.huggingface.structure.trace import (
    ForwardTrace,
    Tensors,
    TracedAttention,
    first_that_differs,
    refusing,
    same_tokens,
    tensors,
)

_TRACE = "rlhfspec_trace"
_NEAR_TOKENS, _FAR_TOKENS = 12, 8
_NO_POSITIONS = "takes positions from the order of tokens, not from position_ids (ALiBi, or a count of its own)"
_SHUFFLED = (7, 2, 9, 3, 11)  # places of the tokens that run again in another order


@torch.inference_mode()
def examine(model: Any, *, name: str, max_context: int) -> Anatomy:
    """Trace test forwards, store the Anatomy found on the model and return it, or raise UnsupportedModel."""
    tracer = _Tracer(model, name)
    with one_layer_wide(model):
        near = tracer.run(within_positions(model, _NEAR_TOKENS))  # though the context may be shorter
        tracer.check_tokens_stay_apart(near)
        tracer.check_lengths_do_not_matter(near, max(max_context, near.num_tokens))
        far = near
        if max_context > _NEAR_TOKENS + _FAR_TOKENS:
            far = tracer.run(_FAR_TOKENS, past=max_context - _FAR_TOKENS)
            tracer.check_tokens_stay_apart(far)
        attentions = tracer.specs(near, far)
    anatomy = Anatomy(
        trunk=near.trunk,
        trunk_output=near.trunk_output,
        attentions=attentions,
        width=near.width,
        vocab_size=near.vocab_size,
        called=frozenset(path for path, _, _ in near.modules),
    )
    keep_anatomy(model, anatomy)
    return anatomy


class _Tracer:
    def __init__(self, model: Any, name: str) -> None:
        self.model = model
        self.name = name
        self.tokens = torch.arange(1, _NEAR_TOKENS + 1) % model.get_input_embeddings().num_embeddings

    def run(self, num_tokens: int, *, past: int = 0) -> ForwardTrace:
        problem = "cannot continue from a KV cache" if past else "is not a text-only model"
        with refusing(self.name, type(self.model).__name__, problem):
            return self._forward(self.tokens[:num_tokens], past, **past_of(self.model, past))

    def check_tokens_stay_apart(self, run: ForwardTrace) -> None:
        """Run tokens in another order. Raise UnsupportedModel unless each token's output stays the same."""
        places = torch.tensor([place for place in _SHUFFLED if place < run.num_tokens])
        shuffled = self._at(self.tokens[places], run.past + places)
        culprit = first_that_differs(run, shuffled, places)
        if culprit is None:
            if not run.attentions:
                raise UnsupportedModel(self.name, type(self.model).__name__, "a model without attention")
            return
        other = self.tokens[: run.num_tokens].clone()
        other[0] = other[1]
        changed = self._forward(other, run.past, **past_of(self.model, run.past))
        mixes = first_that_differs(run, changed, torch.arange(run.num_tokens), first=1) == culprit
        problem = "mixes tokens outside of AttentionInterface" if mixes else _NO_POSITIONS
        kind = type(self.model.get_submodule(culprit)).__name__
        raise UnsupportedModel(self.name, kind, f"{culprit or 'the model'} {problem}")

    def check_lengths_do_not_matter(self, near: ForwardTrace, max_context: int) -> None:
        """Refuse RoPE whose angles change with the sequence's length."""
        for path, module, args, kwargs in near.rotary:
            few = _at_positions(module, args, kwargs, near.num_tokens)
            many = _at_positions(module, args, kwargs, max_context)
            _at_positions(module, args, kwargs, near.num_tokens)  # some remember the longest sequence
            places = torch.arange(near.num_tokens)
            if few and same_tokens(many, few, places, max_context, first=0) is False:
                problem = (
                    f"{path}: RoPE whose angles depend on the length of the sequence ({_rope_kind(module)}); it runs"
                    f" only within its original length, but the context may have {max_context} tokens"
                )
                raise UnsupportedModel(self.name, type(module).__name__, problem)

    def specs(self, near: ForwardTrace, far: ForwardTrace) -> tuple[AttentionSpec, ...]:
        if len(near.attentions) != len(far.attentions):
            problem = "runs other attentions at the beginning of a sequence than later"
            raise UnsupportedModel(self.name, type(self.model).__name__, problem)
        pairs = zip(near.attentions, far.attentions, strict=True)
        return tuple(self._spec(index, begin, end) for index, (begin, end) in enumerate(pairs))

    def _spec(self, index: int, near: TracedAttention, far: TracedAttention) -> AttentionSpec:
        window, chunk = self._pattern(index, near, far)
        num_heads, num_kv_heads, key_dim, value_dim = near.shape
        return AttentionSpec(
            index=index,
            path=near.path,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            scale=near.scale,
            softcap=near.softcap,
            has_sinks=near.has_sinks,
            window=window,
            chunk=chunk,
        )

    def _pattern(self, index: int, near: TracedAttention, far: TracedAttention) -> tuple[int | None, int | None]:
        rows = near.rows + far.rows
        last_start = rows[-1][1]
        if not any(start for _, start in rows):
            return None, None
        query, start = next(row for row in rows if row[1])
        window = query + 1 - start
        if all(start == max(0, query + 1 - window) for query, start in rows):
            return window, None
        if last_start > _FAR_TOKENS:  # chunks: find the length from the one before the last
            rows = self.run(_FAR_TOKENS, past=last_start - _FAR_TOKENS).attentions[index].rows + rows
        chunk = last_start - max(start for _, start in rows if start < last_start)
        if all(start == query - query % chunk for query, start in rows):
            return None, chunk
        raise UnsupportedModel(self.name, near.kind, "attends to an irregular set of earlier tokens")

    def _at(self, tokens: torch.Tensor, positions: torch.Tensor) -> ForwardTrace:
        with refusing(self.name, type(self.model).__name__, "cannot run tokens at arbitrary positions"):
            return self._forward(tokens, 0, position_ids=positions[None], use_cache=False)

    def _forward(self, tokens: torch.Tensor, past: int, **keywords: Any) -> ForwardTrace:
        run = ForwardTrace(self.model, self.name, len(tokens), past)
        with attending(self.model, _TRACE, run.attend, masks=True), run.watching(self.model):
            run.vocab_size = self.model(input_ids=tokens[None], **keywords).logits.shape[-1]
        return run


def _at_positions(module: nn.Module, args: Any, kwargs: Any, count: int) -> Tensors:
    def moved(value: Any) -> Any:
        is_positions = isinstance(value, torch.Tensor) and not value.is_floating_point() and value.ndim in (1, 2)
        return torch.arange(count).expand(*value.shape[:-1], count) if is_positions else value

    output = module(*(moved(value) for value in args), **{name: moved(value) for name, value in kwargs.items()})
    return tuple(tensor.real if tensor.is_complex() else tensor for tensor in tensors(output))


def _rope_kind(module: nn.Module) -> str:
    kind = getattr(module, "rope_type", "of an unknown kind")
    return ", ".join(sorted(set(kind.values()))) if isinstance(kind, dict) else str(kind)
