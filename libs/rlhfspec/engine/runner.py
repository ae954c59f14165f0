"""One model, ready to run flattened batches: unmodified Hugging Face layers over our kernels and the paged cache.

Target and draft are two runners over the same blocks, each with its own KV tensor (its namespace).
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import AttentionInterface

from rlhfspec.drafting.base import IntArray
from rlhfspec.engine import model_support
from rlhfspec.engine.cache import new_kv
from rlhfspec.engine.fuse import FusedModel, RotaryTable, attention_modules, fuse
from rlhfspec.engine.graphs import GraphedForward
from rlhfspec.errors import UnsupportedModel
from rlhfspec.kernels import decoder
from rlhfspec.kernels.decoder import NativeDecoder
from rlhfspec.kernels.tree_attention import AttentionMeta, tree_attention

ATTENTION_NAME = "rlhfspec_tree"
_SELF_CHECK_TOKENS = 24
_IGNORED_KEYWORDS = {  # passed by transformers to every attention function; none changes what is computed here
    "dropout", "is_causal", "position_ids", "output_attentions", "output_hidden_states", "use_cache", "cache_position",
    "position_embeddings", "past_key_values", "use_flash_attn", "return_dict", "layer_idx",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    name: str  # for messages: "target" or "draft"
    dtype: torch.dtype
    arithmetic: str  # rlhfspec.kernels.linear.arithmetic_for decides
    device: torch.device
    max_context: int
    num_blocks: int
    block_size: int


class ModelRunner:
    """`forward` runs N tokens of any mixture of sequences and returns the logits of the wanted rows."""

    def __init__(self, model: Any, config: RunnerConfig) -> None:
        self.config = config
        self.vocab_size = int(model.config.vocab_size)
        self.num_layers = int(model.config.num_hidden_layers)
        self.active: AttentionMeta | None = None
        size = min(_SELF_CHECK_TOKENS, config.max_context, config.num_blocks * config.block_size)
        probe = np.random.default_rng(0).integers(0, self.vocab_size, size).tolist()
        expected = model_support.reference_logits(model, probe)
        num_kv_heads, head_dim = self._record_shapes(model, probe)
        self.kv_shape = (self.num_layers, 2, num_kv_heads, head_dim)
        self.fused = self._prepare(model)
        self.kv = new_kv(
            num_blocks=config.num_blocks, num_layers=self.num_layers, block_size=config.block_size,
            num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=config.dtype, device=config.device,
        )  # fmt: skip
        self._inner = self.fused.model.base_model
        self._head = self.fused.model.get_output_embeddings()
        self._logit_scale = self._final_transform(model.config)
        self._drive = self._drive_generic
        self.native: NativeDecoder | None = None  # runs all layers in one call, where it can
        self._graphs: GraphedForward | None = None
        self._self_check(probe, expected)
        if config.device.type == "cuda":
            self._graphs = GraphedForward(self._run_layers, config.device)

    @property
    def activation_dtype(self) -> torch.dtype:
        """On CPU activations are fp32 whatever weights and KV are stored in (fp64 in the reference mode)."""
        if self.config.device.type == "cpu":
            return torch.float64 if self.config.dtype == torch.float64 else torch.float32
        return self.config.dtype

    def fingerprint(self) -> str:
        """What two engines must share for a sequence's KV to move between them: shapes and arithmetic."""
        parts = (self.fused.model.config.model_type, self.vocab_size, *self.kv_shape, str(self.activation_dtype),
                 str(self.config.dtype), self.config.arithmetic, self.config.block_size)  # fmt: skip
        return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()

    @torch.inference_mode()
    def load_weights(self, state_dict: dict[str, torch.Tensor]) -> None:
        self.fused.load(state_dict)
        if self.native is not None:
            self.native.bind()

    @torch.inference_mode()
    def forward(self, tokens: IntArray, positions: IntArray, meta: AttentionMeta, logit_rows: IntArray) -> torch.Tensor:
        """Run tokens[N] at positions[N]; `meta` says where each row writes and what it sees.

        Returns float32 logits [len(logit_rows), vocab].
        """
        if self.native is not None:
            return self.native.forward(
                tokens.astype(np.int64), positions.astype(np.int64), meta, logit_rows.astype(np.int64)
            )
        hidden = None if self._graphs is None else self._graphs(tokens, positions, meta)
        if hidden is None:
            token_ids = torch.from_numpy(tokens.astype(np.int64)).to(self.config.device)[None]  # [1, N]
            position_ids = torch.from_numpy(positions.astype(np.int64)).to(self.config.device)[None]
            hidden = self._run_layers(token_ids, position_ids, meta)
        wanted = torch.from_numpy(logit_rows.astype(np.int64)).to(self.config.device)
        return self._logits(hidden[0].index_select(0, wanted))

    def _run_layers(self, token_ids: torch.Tensor, position_ids: torch.Tensor, meta: AttentionMeta) -> torch.Tensor:
        """[1, N] tokens and positions -> hidden [1, N, hidden]; attention finds `meta` through `active`."""
        self.active = meta
        try:
            return self._drive(token_ids, position_ids)
        finally:
            self.active = None

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        scale, softcap = self._logit_scale
        logits: torch.Tensor = self._head(hidden)
        if scale != 1.0:
            logits = logits * scale
        if softcap:
            logits = torch.tanh(logits / softcap) * softcap
        return logits.float()

    def _drive_generic(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        output = self._inner(input_ids=token_ids, position_ids=position_ids, use_cache=False)
        return output.last_hidden_state  # type: ignore[no-any-return]

    def _drive_layers(self, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """The same layers without the model's outer wrapper (a third of the host time of a small step)."""
        inner: Any = self._inner
        hidden = inner.embed_tokens(token_ids)
        rotary = inner.rotary_emb(hidden, position_ids=position_ids)
        for layer in inner.layers:
            hidden = layer.forward(
                hidden, attention_mask=None, position_embeddings=rotary, position_ids=position_ids,
                past_key_values=None, use_cache=False,
            )  # fmt: skip
        return inner.norm(hidden)  # type: ignore[no-any-return]

    @staticmethod
    def _final_transform(config: Any) -> tuple[float, float]:
        """What some models do to logits after the head: (scale, soft cap). The self check proves it is all."""
        scale = float(getattr(config, "logit_scale", None) or 1.0)
        scaling = getattr(config, "logits_scaling", None)  # Granite divides
        if scaling:
            scale /= float(scaling)
        return scale, float(getattr(config, "final_logit_softcapping", None) or 0.0)

    def _record_shapes(self, model: Any, probe: list[int]) -> tuple[int, int]:
        recorder = model_support.ShapeRecorder()
        AttentionInterface.register("rlhfspec_shapes", recorder)
        model.set_attn_implementation("rlhfspec_shapes")
        with torch.inference_mode():
            model(input_ids=torch.tensor([probe[:2]]), use_cache=False)
        return recorder.uniform(self.num_layers, self.config.name)

    def _prepare(self, model: Any) -> FusedModel:
        arithmetic = self.config.arithmetic if self.config.device.type == "cpu" else "torch"
        fused = fuse(model, dtype=self.config.dtype, arithmetic=arithmetic, max_context=self.config.max_context)
        fused.model.to(device=self.config.device, dtype=self.activation_dtype)
        for module in attention_modules(fused.model):
            object.__setattr__(module, "rlhfspec_runner", self)  # not a submodule: the runner owns the model
        AttentionInterface.register(ATTENTION_NAME, attend)
        model.set_attn_implementation(ATTENTION_NAME)
        return fused

    def _self_check(self, probe: list[int], expected: torch.Tensor) -> None:
        """One prompt through the cache must give Hugging Face's own logits; also picks the leaner driver if equal."""
        ours = self._probe(probe)
        exact = self.config.dtype != torch.bfloat16
        model_support.compare_self_check(ours.cpu(), expected, name=self.config.name, exact=exact)
        self._drive = self._drive_layers
        try:
            lean = self._probe(probe)
        except (AttributeError, TypeError):
            lean = torch.empty(0)
        if not _same_bits(lean, ours):
            self._drive = self._drive_generic
        self.native = self._native_decoder()
        if self.native is not None and not _same_bits(self._probe(probe), ours):
            self.native = None

    def _native_decoder(self) -> NativeDecoder | None:
        """The one-call decoder for models of the common shape; the layers stay as its slow twin."""
        if self.config.device.type != "cpu" or self.config.arithmetic == "torch" or self._logit_scale != (1.0, 0.0):
            return None
        parts = decoder.recognise(self._inner, self._head)
        rotary = getattr(self._inner, "rotary_emb", None)
        if parts is None or not isinstance(rotary, RotaryTable):
            return None
        tables = rotary.tables(self.activation_dtype)
        if tables is None or tables[0].shape[-1] != self.kv_shape[-1]:
            return None
        num_heads = self.fused.model.config.num_attention_heads
        return NativeDecoder(parts, self.kv, tables[0], tables[1], num_heads)

    def _probe(self, tokens: list[int]) -> torch.Tensor:
        size = len(tokens)
        positions = np.arange(size, dtype=np.int32)
        blocks = -(-size // self.config.block_size)
        meta = AttentionMeta(
            slots=positions, table_rows=np.zeros(size, np.int32), context_lens=positions + np.int32(1),
            extra=np.empty((size, 0), np.int32),
            slot_table=np.arange(blocks * self.config.block_size, dtype=np.int32)[None],
        )  # fmt: skip
        return self.forward(np.asarray(tokens, np.int32), positions, meta, positions)


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.nan_to_num(), right.nan_to_num())


def attend(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
           scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
           s_aux: torch.Tensor | None = None, **keywords: Any) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The attention function transformers calls in every layer. query [1, H, N, D], key/value [1, Hkv, N, D]."""
    unknown = [name for name, given in keywords.items() if given is not None and name not in _IGNORED_KEYWORDS]
    if unknown:
        raise UnsupportedModel("model", type(module).__name__, f"passes attention arguments {sorted(unknown)}")
    runner: ModelRunner = module.rlhfspec_runner
    assert runner.active is not None, "attention outside a forward"
    out = tree_attention(
        query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1),  # [N, H, D]
        runner.kv, module.layer_idx, runner.active,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window, softcap=softcap or 0.0, sinks=s_aux,
    )  # fmt: skip
    return out[None], None


def concatenate_ranges(starts: IntArray, counts: IntArray) -> IntArray:
    """[starts[0], starts[0]+1, ..., starts[1], ...]: the flattened positions of many chunks.

    >>> concatenate_ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    ends = np.fromiter(itertools.accumulate(counts.tolist()), np.int64, len(counts))
    total = int(ends[-1]) if len(ends) else 0
    positions: IntArray = (np.arange(total) + np.repeat(starts - (ends - counts), counts)).astype(np.int32)
    return positions
