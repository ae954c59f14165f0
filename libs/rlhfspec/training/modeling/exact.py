"""Exact on-policy training (`training.exactOnPolicy`): the trainer's forward on the engine's kernels.

Log-probs then depend only on sequence and weights, bit for bit, so a step's first ratio is exactly 1. `ExactForward`
needs the CPU kernels and twice the weights' memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from rlhfspec import job
from rlhfspec.common.context import holding
from rlhfspec.engine.kv.cache import new_kv
from rlhfspec.errors import InvalidRequest, UnsupportedModel
from rlhfspec.huggingface.fused.casting import Precision, precision_of, round_parameters
from rlhfspec.huggingface.proof.check import OWN_BITS, keep_report, report_of
from rlhfspec.huggingface.proof.probes import Probe
from rlhfspec.huggingface.proof.reference import (
    TOLERANCES,
    ExpertChoices,
    ProbeResult,
    Reference,
    Rounding,
    ask,
    same_bits,
)
from rlhfspec.huggingface.structure.attention import (
    AttentionSpec,
    cache_shape,
    fit_cache,
    refuse_unknown,
    use_eager_experts,
)
from rlhfspec.huggingface.structure.causal_lm import anatomy_of
from rlhfspec.kernels.attention_splits import SPLIT
from rlhfspec.kernels.cpu import build
from rlhfspec.kernels.linear import arithmetic_for
from rlhfspec.kernels.tree_attention import AttentionMeta, tree_attention
from rlhfspec.training.modeling import packed
from rlhfspec.training.modeling.exact_functions import exact, exact_log_probs, stored
from rlhfspec.training.modeling.exact_modules import ExactModules
from rlhfspec.training.modeling.log_probs import TokenLogProbs, TorchForward, entropy_of
from rlhfspec.training.modeling.one_call import RowPart
from rlhfspec.training.modeling.packed import PackedRow
from rlhfspec.training.modeling.probed import answers, every_row, probes_of, random_keys

_EXACT_ATTENTION = "rlhfspec_exact"
_BLOCK_SIZE = 16  # of the scratch keys and values; bits do not depend on it


def check_exact(spec: job.Spec) -> None:
    """Raise InvalidRequest for settings incompatible with exactOnPolicy."""
    if not spec.training.exact_on_policy:
        return
    dropout = 0.0 if spec.model.lora is None else spec.model.lora.dropout
    recomputes = spec.training.activation_checkpointing
    refused: tuple[tuple[bool, str, object, str], ...] = (
        (recomputes == "on", "training.activationCheckpointing", recomputes, "must not be on"),
        (spec.training.autocast == "bfloat16", "training.autocast", spec.training.autocast, "must be off"),
        (dropout > 0, "model.lora.dropout", dropout, "must be 0"),
        (spec.model.dtype == "bfloat16", "model.dtype", spec.model.dtype, "must be float32 (generation.dtype is free)"),
    )
    for present, field, value, problem in refused:
        if present:
            raise InvalidRequest(field, value, f"{problem} with training.exactOnPolicy")


class ExactForward(TorchForward):
    """Forward of the policy with the bits of an engine of the same dtype, arithmetic and attention_split.

    The model must be prepared for packed rows, float32, on the CPU, and never deep-copied afterwards.
    """

    def __init__(
        self, model: Any, temperature: float, *, max_context: int, dtype: str = "float32", arithmetic: str = "auto",
        attention_split: int = SPLIT,
    ) -> None:  # fmt: skip
        super().__init__(model, temperature)
        _check_possible(model)
        kept_as = getattr(torch, dtype)
        arithmetic = arithmetic_for(kept_as, arithmetic)
        probes = probes_of(model, max_context)
        precision = precision_of(model, kept_as)
        reference = _rounded_reference(model, probes, precision, arithmetic)
        self.modules_on_kernels = ExactModules(self.parts, precision, arithmetic=arithmetic, max_context=max_context)
        self._split = attention_split
        self._cache = _Scratch(kept_as, *cache_shape(self.parts.anatomy.attentions))
        self._row: _AttentionRow | None = None
        self._packed_versions: list[int] | None = None
        AttentionInterface.register(_EXACT_ATTENTION, attend)
        self.model.set_attn_implementation(_EXACT_ATTENTION)
        use_eager_experts(self.model)
        self._prove(probes, reference)

    def forward(self, batch: PackedRow, *, entropy_gradient: bool = False) -> TokenLogProbs:
        if torch.is_autocast_enabled("cpu"):
            raise InvalidRequest("training.autocast", "bfloat16", "must be off with training.exactOnPolicy")
        self._repack_if_changed()
        return super().forward(batch, entropy_gradient=entropy_gradient)

    def hidden(self, batch: PackedRow) -> torch.Tensor:
        with self._laid_out(batch.parts):
            return super().hidden(batch)

    def weights_changed(self) -> None:
        """Make the next forward repack the weights. In-place changes are detected without this call."""
        self._packed_versions = None

    def _of(self, hidden: torch.Tensor, targets: torch.Tensor, entropy_gradient: bool) -> dict[str, torch.Tensor]:
        logits = self.parts.logits(hidden)  # [t, vocab] float32
        log_probs = exact_log_probs(logits, targets, self.temperature)
        with torch.no_grad():
            untempered = log_probs.detach() if self.temperature == 1 else exact_log_probs(logits, targets, 1.0)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = entropy_of((logits if self.temperature == 1 else logits / self.temperature).log_softmax(dim=-1))
        return {"log_probs": log_probs, "untempered": untempered, "entropy": entropy}

    def _repack_if_changed(self) -> None:
        versions = [parameter._version for parameter in self.model.parameters()]
        if versions != self._packed_versions:
            self.modules_on_kernels.repack()
            self._packed_versions = versions

    @contextmanager
    def _laid_out(self, parts: tuple[RowPart, ...]) -> Iterator[None]:
        self._row = _AttentionRow.of(parts, self.parts.anatomy.attentions)
        try:
            with holding(_running, self):
                yield
        finally:
            self._row = None

    def attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float,
                  sinks: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
        row, cache = self._row, self._cache
        assert row is not None, "exact attention outside a forward"
        spec = next(row.coming)

        def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor | None) -> torch.Tensor:
            q, k, v = (
                fit_cache(states, count, cache.dim)[0].transpose(0, 1)  # [T, heads, D]
                for states, count in ((q, q.shape[1]), (k, cache.heads), (v, cache.heads))
            )
            out = tree_attention(
                q, k, v, cache.kv(row.num_tokens), 0, row.meta,
                scale=scale, sliding_window=spec.window, chunk=spec.chunk, softcap=softcap, sinks=s, split=self._split,
            )  # fmt: skip
            return out[None, ..., : spec.value_dim].contiguous()

        def twin(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor | None) -> torch.Tensor:
            k, v = stored(k, cache.dtype), stored(v, cache.dtype)
            return packed.row_attention(q, k, v, row.parts, spec, scale, softcap, s)

        return exact(kernel, twin, query, key, value, sinks)

    @torch.no_grad()
    def _prove(self, probes: Sequence[Probe], reference: Reference) -> None:
        """Raise unless logits match Hugging Face's and do not depend on neighbouring sequences."""
        self._repack_if_changed()
        self.modules_on_kernels.guard_rows(lambda: self._answers(probes))
        alone, together = [self._answers([probe])[0] for probe in probes], self._answers(probes)
        difference = reference.check(alone, TOLERANCES[self._cache.dtype], whose="the exact trainer's")
        if not same_bits(alone, together):
            problem = "a sequence's logits depend on its neighbours, so exactOnPolicy is not possible"
            raise UnsupportedModel("model", reference.kind, problem)
        report = replace(
            report_of(self.model), path="exact", difference=difference, noise=reference.noise, bits=OWN_BITS,
            attention_split=self._split,
        )  # fmt: skip
        keep_report(self.model, report)

    def _answers(self, probes: Sequence[Probe]) -> list[ProbeResult]:
        batch = every_row(probes)
        with random_keys(self.model, probes, attend), ExpertChoices() as choices:
            found = answers(self.parts.logits(self.hidden(batch)), batch)
        return found if len(probes) > 1 else [ProbeResult(found[0].logits, choices.made)]


def _rounded_reference(model: Any, probes: Sequence[Probe], precision: Precision, arithmetic: str) -> Reference:
    before = round_parameters(model, precision)
    try:
        rounding = Rounding(precision, arithmetic=arithmetic)
        return ask(model, anatomy_of(model), probes, name="model", rounding=rounding)
    finally:
        for name, values in before.items():
            model.get_parameter(name).data = values


def _check_possible(model: Any) -> None:
    if build.load() is None:
        raise InvalidRequest("training.exactOnPolicy", True, f"needs the CPU kernels: {build.unavailable_reason()}")
    devices = {parameter.device.type for parameter in model.parameters()}
    if devices != {"cpu"}:
        raise InvalidRequest("training.exactOnPolicy", True, f"needs the policy on the CPU, not on {sorted(devices)}")
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if dtypes != {torch.float32}:
        raise InvalidRequest("model.dtype", str(dtypes), "must be float32 with training.exactOnPolicy")


@dataclass(frozen=True, slots=True)
class _AttentionRow:
    """Attention metadata of a packed row, and the layers still to run."""

    parts: tuple[RowPart, ...]
    num_tokens: int
    meta: AttentionMeta
    coming: Iterator[AttentionSpec]

    @classmethod
    def of(cls, parts: tuple[RowPart, ...], attentions: tuple[AttentionSpec, ...]) -> _AttentionRow:
        """Assign KV slots in token order. An answer's slot table begins with its prompt's slots."""
        lengths = [part.length for part in parts]
        slots = np.arange(sum(lengths), dtype=np.int32)
        own = np.split(slots, np.cumsum(lengths)[:-1])
        seen = [
            places if part.behind is None else np.concatenate((own[part.behind], places))
            for places, part in zip(own, parts, strict=True)
        ]
        slot_table = np.zeros((len(parts), max(map(len, seen))), np.int32)
        for row, places in enumerate(seen):
            slot_table[row, : len(places)] = places
        sizes = np.array([len(places) for places in seen], np.int32)
        rows = np.repeat(np.arange(len(parts), dtype=np.int32), lengths)
        ends = np.cumsum(lengths, dtype=np.int32)
        meta = AttentionMeta(
            slots=slots,
            table_rows=rows,
            context_lens=slots + np.int32(1) + (sizes - ends)[rows],
            extra=np.empty((len(slots), 0), np.int32),
            slot_table=slot_table,
        )
        return cls(parts, len(slots), meta, iter(attentions))


class _Scratch:
    def __init__(self, dtype: torch.dtype, heads: int, dim: int) -> None:
        self.dtype = dtype
        self.heads = heads
        self.dim = dim
        self._kv = self._room(0)

    def kv(self, num_tokens: int) -> torch.Tensor:
        """Return a cache [blocks, 1, 2, block size, heads, dim] for at least `num_tokens`."""
        num_blocks = -(-num_tokens // _BLOCK_SIZE)
        if len(self._kv) < num_blocks:
            self._kv = self._room(num_blocks)
        return self._kv

    def _room(self, num_blocks: int) -> torch.Tensor:
        return new_kv(
            num_blocks=num_blocks, num_layers=1, block_size=_BLOCK_SIZE, num_kv_heads=self.heads,
            head_dim=self.dim, dtype=self.dtype, device=torch.device("cpu"),
        )  # fmt: skip


_running: ContextVar[ExactForward] = ContextVar("the exact forward that runs in this thread")


def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
           scaling: float | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
           **keywords: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    refuse_unknown(module, keywords)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _running.get().attention(query, key, value, scale, softcap or 0.0, s_aux), None
