"""Model runner for flattened batches: Hugging Face layers over rlhfspec kernels and a paged KV cache."""

from __future__ import annotations

import copy
import hashlib
import math
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from rlhfspec.common.arrays import IntArray
from rlhfspec.common.context import holding
from rlhfspec.engine.base import Bytes
from rlhfspec.engine.forward import constant_shape
from rlhfspec.engine.forward.chunks import LEAST_ROWS, ChunkedMeta, Chunks, chunk_attention, told, why_ours
from rlhfspec.engine.forward.device import check_fits
from rlhfspec.engine.forward.graphs import GraphedForward, can_capture
from rlhfspec.engine.forward.led import Others
from rlhfspec.engine.kv.cache import give_back, new_kv
from rlhfspec.errors import InvalidRequest, UnsupportedModel
from rlhfspec.huggingface.checksums import checksums
from rlhfspec.huggingface.cutting import cut_of
from rlhfspec.huggingface.fused.casting import Precision, cast, narrow, precision_of
from rlhfspec.huggingface.fused.experts import ExpertLoad
from rlhfspec.huggingface.fused.fuse import FusedModel, fuse
from rlhfspec.huggingface.fused.native import native_decoder
from rlhfspec.huggingface.fused.widened import widen
from rlhfspec.huggingface.proof import kept
from rlhfspec.huggingface.proof.check import OWN_BITS, RunnerProof, adopt, prove
from rlhfspec.huggingface.proof.probes import choose
from rlhfspec.huggingface.proof.reference import TOLERANCES, Rounding, ask
from rlhfspec.huggingface.structure.anatomy import examine
from rlhfspec.huggingface.structure.attention import (
    AttentionSpec,
    cache_shape,
    fit_cache,
    refuse_unknown,
    use_eager_experts,
)
from rlhfspec.huggingface.structure.causal_lm import CausalLM
from rlhfspec.kernels.attention_splits import SPLIT
from rlhfspec.kernels.decoder import NativeDecoder
from rlhfspec.kernels.kv_pack import copy_slots, pack_into, unpack_from
from rlhfspec.kernels.tree_attention import AttentionMeta, IndexArray, tree_attention
from rlhfspec.messages.records.models import ModelReport

_TREE_ATTENTION = "rlhfspec_tree"
SPARE_BYTES = 1 << 30  # of KV: 8,000 tokens of an 8B model
# On CUDA torch multiplies in fewer bits. A correct bfloat16 model differs by .011 to .017 from the reference.
_TOLERANCES_OF_CUDA = {torch.float32: 2e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Taps:
    """Hidden states that forwards tell for a drafter, and its room in the KV cache."""

    name: str  # of the drafter, for messages
    layers: tuple[int, ...]  # whose inputs are told, ascending; none: the trunk's output
    attention: AttentionSpec  # of the drafter's own layer
    width: int  # values kept for each position

    def pages(self, heads: int, dim: int) -> int:
        """Return how many layers of the cache hold a position's values."""
        return -(-self.width // (2 * heads * dim))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    name: str  # for messages: "model", "drafter", "reference" or "critic"
    dtype: torch.dtype
    arithmetic: str  # see rlhfspec.kernels.linear.arithmetic_for
    device: torch.device
    max_context: int
    num_blocks: int
    block_size: int
    num_spare_blocks: int = 0  # beyond `num_blocks`, limited by SPARE_BYTES: for KV kept only to save time
    attention_split: int = SPLIT
    gpu_memory_fraction: float = 1.0  # part of a device's memory for weights and KV
    exact_rows: int = 0  # rows of every forward on a device, for batch-invariant bits; 0: any shape
    taps: Taps | None = None
    must_be_exact: bool = True  # refuse a model that is not exact; otherwise run forwards of any shape


class ModelRunner:
    """Runner of a model, modified in place and checked against Hugging Face at construction (see `report`)."""

    tapped = torch.empty(0)  # [N, taps, width] of the last forward

    def __init__(self, model: Any, config: RunnerConfig) -> None:
        began = time.perf_counter()
        self.config = config
        if config.dtype != torch.bfloat16 and config.device.type == "cpu":
            widen(model.parameters())  # now, because converting layer by layer takes longer
        anatomy = examine(model, name=config.name, max_context=config.max_context)
        self.vocab_size = anatomy.vocab_size
        self.num_token_ids = int(model.get_input_embeddings().num_embeddings)  # accepted ids; the output may have fewer
        if self.num_token_ids < self.vocab_size:
            problem = f"outputs {self.vocab_size} token ids, but its embedding has only {self.num_token_ids}"
            raise UnsupportedModel(config.name, type(model).__name__, problem)
        self.attentions = anatomy.attentions
        self.kv_shape = _kv_shape(anatomy.attentions, config.taps)
        room = min(config.max_context, config.num_blocks * config.block_size)
        probes = choose(anatomy, model.config, room, self.num_token_ids)
        precision = precision_of(model, config.dtype)
        narrow(model, precision)
        rounding = Rounding(precision, arithmetic=config.arithmetic, activations=self.activation_dtype)
        key = kept.key_of(
            model, probes, config.device, config.dtype, config.arithmetic, config.attention_split, config.block_size,
            bool(config.exact_rows), config.must_be_exact, self.kv_shape,
        )  # fmt: skip
        verdict = kept.find(key)
        reference = None if verdict is not None else ask(model, anatomy, probes, name=config.name, rounding=rounding)
        check_fits(
            config.device, config.gpu_memory_fraction,
            weights=sum(parameter.numel() for parameter in model.parameters()) * config.dtype.itemsize,
            kv=config.num_blocks * config.block_size * self.bytes_per_position,
        )  # fmt: skip
        self.fused = self._prepare(model, precision)
        self._graphs: GraphedForward | None = None
        self.hold(config.num_blocks)
        self.parts = CausalLM(model)
        self.native: NativeDecoder | None = None  # runs all layers in one call, if possible
        self.others: Others | None = None  # processes with the other parts of the model, which repeat this one's calls
        self._trunk_inputs = _tap(self.parts.trunk, config.taps)
        self._active: AttentionMeta | None = None
        self._coming: Iterator[AttentionSpec] = iter(())
        self._digest = ""
        own_kernel = self._why_own_kernel()
        self._by_flash = frozenset(index for index, reason in enumerate(own_kernel) if not reason)
        if verdict is not None:
            adopt(self, anatomy, probes, verdict)
        else:
            assert reference is not None
            tolerances = TOLERANCES if config.device.type == "cpu" else _TOLERANCES_OF_CUDA
            kept_as = str(config.dtype).removeprefix("torch.")
            proof = RunnerProof(
                self, anatomy, reference, self.is_row_invariant, config.must_be_exact, tolerances[config.dtype],
                config.attention_split, kept_as, told(own_kernel) if own_kernel else "",
            )  # fmt: skip
            verdict = prove(proof)
            kept.keep(key, verdict)
        self.report: ModelReport = replace(verdict.report, seconds=time.perf_counter() - began)
        if self.report.bits != OWN_BITS:
            self.config = replace(self.config, exact_rows=0)
        give_back(self.kv)
        self.expert_load = ExpertLoad(self.fused.model)
        if can_capture(config.device) and not self.expert_load.rows():  # the host decides which experts run
            self._graphs = GraphedForward(self._run_layers, config.device)

    @property
    def activation_dtype(self) -> torch.dtype:
        """Return the activation dtype: on a CPU fp32 (fp64 for float64 weights), elsewhere the weights' dtype."""
        if self.config.device.type == "cpu":
            return torch.float64 if self.config.dtype == torch.float64 else torch.float32
        return self.config.dtype

    @property
    def is_row_invariant(self) -> bool:
        """Return whether a row's result is bitwise independent of the other rows."""
        return bool(self.config.exact_rows) or (self.config.device.type == "cpu" and self.config.arithmetic != "torch")

    @cached_property
    def architecture(self) -> str:
        """Return a digest of shapes, attention, dtypes and arithmetic, without the weights."""
        arithmetic = f"{self.config.arithmetic}, exact" if self.config.exact_rows else self.config.arithmetic
        parts = (self.config.dtype, self.activation_dtype, arithmetic, self.config.attention_split, self.kv_shape[0],
                 self.attentions, type(self.fused.model).__name__, self.fused.shapes)  # fmt: skip
        digest, cut = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest(), cut_of(self.fused.model)
        return digest if cut is None else f"{digest} of {cut.group.num_ranks} processes"

    @property
    def bytes_per_position(self) -> int:
        """Return the KV bytes per position in this process, over all layers."""
        return math.prod(self.kv_shape) * self.config.dtype.itemsize

    @property
    def _num_spare_blocks(self) -> int:
        most = SPARE_BYTES // (self.bytes_per_position * self.config.block_size)
        return min(self.config.num_spare_blocks, most)

    def hold(self, num_blocks: int) -> None:
        """Reallocate the KV with `num_blocks` blocks, losing its content."""
        self.config = config = replace(self.config, num_blocks=num_blocks)
        self.kv = torch.empty(0)  # free the old tensor before allocating the next
        self.kv = new_kv(
            num_blocks=num_blocks + self._num_spare_blocks, num_layers=self.kv_shape[0], block_size=config.block_size,
            num_kv_heads=self.kv_shape[2], head_dim=self.kv_shape[3], dtype=config.dtype, device=config.device,
        )  # fmt: skip
        if self._graphs is not None:  # recorded with the old tensor
            self._graphs = GraphedForward(self._run_layers, config.device)

    def over_the_same_kv(self, model: Any) -> ModelRunner:
        """Return a runner of another model of this architecture, which shares this one's KV."""
        other = copy.copy(self)
        other.config = replace(self.config, exact_rows=0)
        other.parts = CausalLM(model)
        if self.native is not None:
            other.native = other.native_decoder()
        if self._graphs is not None:
            other._graphs = GraphedForward(other._run_layers, self.config.device, self._graphs.capture)
        return other

    @torch.inference_mode()
    def record(self, slot_table: IndexArray, *, most_rows: int, depth: int) -> None:
        if self._graphs is not None:
            rows = (self.config.exact_rows,) * 2 if self.config.exact_rows else (1, most_rows)
            self._graphs.record(slot_table, rows=rows, depth=depth)

    def fingerprint(self) -> str:
        """Return a digest of weights, configuration and arithmetic; KV moves only between equal ones."""
        if not self._digest:
            total = hashlib.blake2b(self.architecture.encode(), digest_size=16)
            for each in checksums(list(self.fused.held())):
                total.update(each)
            own = total.hexdigest()
            self._digest = own if self.others is None else self.others.fingerprint(own)
        return self._digest

    @torch.inference_mode()
    def load_weights(self, state_dict: dict[str, torch.Tensor]) -> None:
        if self.others is not None:
            state_dict = self.others.load_weights(self.fused.checked(state_dict, self.others.shapes))
        self.fused.load(state_dict)
        self._digest = ""
        if self.native is not None:
            self.native.bind()

    @torch.inference_mode()
    def forward(
        self,
        tokens: IndexArray,
        positions: IndexArray,
        meta: AttentionMeta,
        logit_rows: IndexArray,
        *,
        graphed: bool = True,
    ) -> torch.Tensor:
        """Run tokens [N]; return float32 logits [len(logit_rows), vocab]. Inputs: all numpy, or all on the device."""
        if self.others is not None:
            self.others.forward(tokens, positions, meta, logit_rows, graphed)
        if self.native is not None:
            token_ids, places, wanted = (np.asarray(ids, np.int64) for ids in (tokens, positions, logit_rows))
            logits = self.native.forward(token_ids, places, meta, wanted)
            self.tapped = self.native.tapped
            return logits
        if self.config.exact_rows:
            return self._forward_exactly(tokens, positions, meta, logit_rows, graphed)
        if isinstance(meta.slots, np.ndarray) and (chunks := self.chunks_of(meta)) is not None:
            meta = ChunkedMeta.of(meta, chunks, self.config.device)
        return self._logits(self._untapped(self._hidden(tokens, positions, meta, graphed), len(tokens)), logit_rows)

    def _untapped(self, hidden: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Keep the taps behind the hidden states as `tapped`, and return the hidden states."""
        if self.config.taps is not None:
            taps = hidden[:num_rows, self.parts.width if self.config.taps.layers else 0 :]
            self.tapped = taps.reshape(num_rows, max(len(self.config.taps.layers), 1), -1)
            hidden = hidden[:, : self.parts.width]
        return hidden

    def _hidden(self, tokens: IndexArray, positions: IndexArray, meta: AttentionMeta, graphed: bool) -> torch.Tensor:
        graphs = self._graphs if graphed and not isinstance(meta, ChunkedMeta) else None
        hidden = None if graphs is None else graphs(tokens, positions, meta)
        if hidden is None:
            token_ids, position_ids = (torch.as_tensor(ids, device=self.config.device) for ids in (tokens, positions))
            hidden = self._run_layers(token_ids.long()[None], position_ids.long()[None], meta)
        return hidden[0]

    def _logits(self, hidden: torch.Tensor, rows: IndexArray) -> torch.Tensor:
        return self.parts.logits(hidden.index_select(0, torch.as_tensor(rows, device=hidden.device)))

    def _forward_exactly(
        self, tokens: IndexArray, positions: IndexArray, meta: AttentionMeta, logit_rows: IndexArray, graphed: bool
    ) -> torch.Tensor:
        num_rows = self.config.exact_rows
        given = constant_shape.parts(tokens, positions, meta, num_rows)
        hidden = torch.cat(
            [self._hidden(*part, graphed).clone() for part in given]
        )  # the next replay overwrites a graph's result
        hidden = self._untapped(hidden, len(tokens))
        logits = [self._logits(hidden, rows)[:count] for rows, count in constant_shape.rows_of(logit_rows, num_rows)]
        if len(logits) == 1:
            return logits[0]  # without a second copy
        return torch.cat(logits) if logits else self._logits(hidden, logit_rows)

    def chunks_of(self, meta: AttentionMeta) -> Chunks | None:
        if not self._by_flash:
            return None
        return Chunks.of(meta, least_rows=LEAST_ROWS, most_keys=self.config.max_context)

    @property
    def gathered_bytes(self) -> int:
        return self.config.max_context * self.bytes_per_position // self.kv_shape[0] if self._by_flash else 0

    def copy(self, source: IntArray, target: IntArray) -> None:
        if self.others is not None:
            self.others.copy(source, target)
        copy_slots(self.kv, source, target)

    def read(self, slots: IntArray, out: Bytes) -> None:
        if self.others is not None:
            self.others.read(slots, out, partial(pack_into, self.kv))
        else:
            pack_into(self.kv, slots, out)

    def write(self, slots: IntArray, kv: Bytes) -> None:
        if self.others is not None:
            self.others.write(slots, kv, lambda slots, own: unpack_from(own, self.kv, slots))
        else:
            unpack_from(kv, self.kv, slots)

    def native_decoder(self) -> NativeDecoder | None:
        """Return the native decoder, which runs a forward in one call, or None if unsupported."""
        is_cut, taps = cut_of(self.fused.model) is not None, self.config.taps
        if self.config.exact_rows or not self.is_row_invariant or is_cut or (taps is not None and not taps.layers):
            return None
        layers = () if taps is None else taps.layers
        return native_decoder(self.parts, self.kv, self.activation_dtype, self.config.attention_split, layers)

    def _run_layers(self, token_ids: torch.Tensor, position_ids: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """Run the layers on tokens and positions [1, N]; attention reads `meta` through the runner."""
        self._active, self._coming = meta, iter(self.attentions)
        try:
            with holding(_running, self):
                hidden = self.parts.hidden(token_ids, position_ids)
                return torch.cat((hidden, *self._trunk_inputs), -1) if self._trunk_inputs else hidden
        finally:
            self._active = None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float,
               sinks: torch.Tensor | None) -> torch.Tensor:  # fmt: skip
        """Run the next attention layer: query [1, H, N, Dk], key and value [1, Hkv, N, .] -> [1, N, H, Dv]."""
        assert self._active is not None
        spec, (heads, dim) = next(self._coming), self.kv_shape[2:]
        query, key, value = (
            fit_cache(states, count, dim)[0].transpose(0, 1)  # [N, heads, D]
            for states, count in ((query, query.shape[1]), (key, heads), (value, heads))
        )
        meta = self._active
        if isinstance(meta, ChunkedMeta) and spec.index in self._by_flash:
            out = chunk_attention(
                query, key, value, self.kv, spec.index, meta,
                scale=scale, sliding_window=spec.window, split=self.config.attention_split,
            )  # fmt: skip
            return out[None, ..., : spec.value_dim].contiguous()
        out = tree_attention(
            query, key, value, self.kv, spec.index, meta,
            scale=scale, sliding_window=spec.window, chunk=spec.chunk, softcap=softcap, sinks=sinks,
            split=self.config.attention_split,
        )  # fmt: skip
        return out[None, ..., : spec.value_dim].contiguous()

    def _why_own_kernel(self) -> list[str]:
        """Return, per attention layer, why FlashAttention cannot run it (empty: it can); an empty list on a CPU."""
        if self.config.device.type == "cpu":
            return []
        if self.config.exact_rows:
            return ["a row's bits must not depend on other rows"] * len(self.attentions)
        kinds = {replace(spec, index=0): why_ours(spec, self.kv) for spec in self.attentions}
        return [kinds[replace(spec, index=0)] for spec in self.attentions]

    def _prepare(self, model: Any, precision: Precision) -> FusedModel:
        fused = fuse(model, precision, arithmetic=self.config.arithmetic, max_context=self.config.max_context)
        computed_in = self.activation_dtype
        cast(fused.model, precision if computed_in == self.config.dtype else Precision(computed_in))
        fused.model.to(device=self.config.device)  # in the stored dtype: in float32 it may not fit
        AttentionInterface.register(_TREE_ATTENTION, attend)
        model.set_attn_implementation(_TREE_ATTENTION)
        use_eager_experts(model)
        return fused


def _kv_shape(attentions: tuple[AttentionSpec, ...], taps: Taps | None) -> tuple[int, int, int, int]:
    if taps is None:
        return (len(attentions), 2, *cache_shape(attentions))
    heads, dim = cache_shape(attentions)
    if cache_shape((*attentions, taps.attention)) != (heads, dim):
        problem = f"has more or wider key/value heads than the policy: {taps.attention}"
        raise InvalidRequest("drafter", taps.name, problem)
    return (len(attentions) + 1 + taps.pages(heads, dim), 2, heads, dim)


def _tap(trunk: Any, taps: Taps | None) -> list[torch.Tensor]:
    """Return a list that holds the inputs of the tapped layers after each run of the trunk."""
    if taps is None:
        return []
    found = [torch.empty(0)] * len(taps.layers)

    def note(place: int, layer: Any, given: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        found[place] = given[0] if given else keywords["hidden_states"]

    for place, number in enumerate(taps.layers):
        trunk.layers[number].register_forward_pre_hook(partial(note, place), with_kwargs=True)
    return found


_running: ContextVar[ModelRunner] = ContextVar("the runner whose layers run in this thread")


def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
           scaling: float | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None,
           **keywords: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    refuse_unknown(module, keywords)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return _running.get().attend(query, key, value, scale, softcap or 0.0, s_aux), None
