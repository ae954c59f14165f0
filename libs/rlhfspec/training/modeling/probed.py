"""Verification probes in one packed row, for forwards without a KV cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import Any

import torch
from transformers import AttentionInterface

from rlhfspec.common.context import holding
from rlhfspec.huggingface.fused.audit import not_audited
from rlhfspec.huggingface.proof.probes import Probe, choose_without_cache, random_past
from rlhfspec.huggingface.proof.reference import ProbeResult
from rlhfspec.huggingface.structure.attention import AttentionSpec, as_before
from rlhfspec.huggingface.structure.causal_lm import anatomy_of
from rlhfspec.training.modeling.packed import PackedRow, pack_sequences

_PROBED_ATTENTION = "rlhfspec_probed"


def probes_of(model: Any, max_context: int) -> tuple[Probe, ...]:
    """Return the model's probes from position 0, because the trainer has no KV cache."""
    num_token_ids = model.get_input_embeddings().num_embeddings
    return choose_without_cache(anatomy_of(model), model.config, max_context, num_token_ids)


def every_row(probes: Sequence[Probe]) -> PackedRow:
    """Pack the probes into one row that keeps the output of every token."""
    row = pack_sequences([probe.tokens[:1] for probe in probes], [(*probe.tokens[1:], 0) for probe in probes])
    return replace(row, position_ids=torch.tensor([list(chain.from_iterable(probe.positions for probe in probes))]))


def answers(logits: torch.Tensor, batch: PackedRow) -> list[ProbeResult]:
    return [ProbeResult(rows, []) for rows in torch.split(logits, list(batch.lengths))]


@dataclass(slots=True)
class _Probed:
    attend: Callable[..., Any]
    coming: Iterator[AttentionSpec]
    places: tuple[slice, ...]  # of the tokens whose keys and values are random


_probed: ContextVar[_Probed] = ContextVar("the packed row of probes that runs in this thread")


@contextmanager
def random_keys(model: Any, probes: Sequence[Probe], function: Callable[..., Any]) -> Iterator[None]:
    """Route one forward's attention to `function`, replacing each probe's first keys and values by random ones."""
    starts = accumulate((len(probe.tokens) for probe in probes), initial=0)
    places = tuple(slice(start, start + probe.num_random) for start, probe in zip(starts, probes, strict=False))
    AttentionInterface.register(_PROBED_ATTENTION, _attend_probed)
    with holding(_probed, _Probed(function, iter(anatomy_of(model).attentions), places)), as_before(model):
        model.set_attn_implementation(_PROBED_ATTENTION)
        yield


def _attend_probed(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
                   **keywords: Any) -> Any:  # fmt: skip
    probed = _probed.get()
    spec = next(probed.coming)
    with not_audited():  # not the model's own code
        key, value = key.clone(), value.clone()
        for place in probed.places:
            key[:, :, place], value[:, :, place] = random_past(spec, place.stop - place.start)
    return probed.attend(module, query, key, value, attention_mask, **keywords)
