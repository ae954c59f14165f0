"""Settings of the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.errors import InvalidRequest
from rlhfspec.job.choices.drafters import AUTO, OFF
from rlhfspec.kernels.attention_splits import SPLIT, UNIT

_DTYPES = ("float32", "bfloat16", "float64")
_EXACT = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine, checked at construction.

    dtype: how weights are stored. float32, bfloat16, or float64 (the slow reference mode, torch kernels only).
    device: "cpu", "cuda" or any other device that torch has.
    arithmetic: "auto", "fma", "amx", "dpbf16" or "torch": how CPU linear layers add up (docs/kernels.md). Tokens depend
        on it, so pin it where machines of different kinds share one job.
    exact: "auto", "on" or "off": on a device other than the CPU, whether a token's bits are its own in any company (on)
        or forwards take the fastest shape (off, auto); on a CPU they always are (docs/law.md).
    attention_split: positions that have a softmax of their own in attention, a multiple of 64 (docs/kernels.md).
        Tokens of longer contexts depend on it; sequences move only between engines with the same one.
    speculation: "off", "suffix", "model", "adaptive", a static strategy's name, or a Plan.
    learning: whether the drafter learns (docs/learning.md): "off", "auto" (while that pays), or the share of step time
        that it may take, beside all idle time.
    num_threads: CPU threads of the kernels; None takes torch's setting.
    max_sequences: rows decoded together. max_context: tokens of prompt and response of one sequence.
    kv_cache_tokens: memory for KV in tokens; None: enough for every row at full context, or what fits on a GPU.
    gpu_memory_fraction: part of a GPU's memory that this process may take, weights included.
    block_size: tokens a block, a power of two. prefill_chunk: prompt tokens run per step.
    prefix_sharing: samples of one prompt share its whole blocks.
    tree_slots: spare slots a sequence may use for tree nodes.
    profile: measure the cost tables at start (a few seconds); off: the selector learns while running.
    """

    dtype: str = "float32"
    device: str = "cpu"
    arithmetic: str = "auto"
    exact: str = "auto"
    attention_split: int = SPLIT
    speculation: str | DraftPlan = "adaptive"
    learning: str | float = OFF
    num_threads: int | None = None
    max_sequences: int = 64
    max_context: int = 1024
    kv_cache_tokens: int | None = None
    gpu_memory_fraction: float = 0.85
    block_size: int = 16
    prefill_chunk: int = 512
    prefix_sharing: bool = True
    tree_slots: int = 64
    profile: bool = True

    def __post_init__(self) -> None:
        if self.max_context < 2:
            raise InvalidRequest("max_context", self.max_context, "must be >= 2: a prompt's token and one more")
        positive = ("max_sequences", "prefill_chunk", "block_size")
        for name in positive:
            if getattr(self, name) < 1:
                raise InvalidRequest(name, getattr(self, name), "must be >= 1")
        if self.block_size & (self.block_size - 1):
            raise InvalidRequest("block_size", self.block_size, "must be a power of two")
        if self.attention_split < UNIT or self.attention_split % UNIT:
            raise InvalidRequest("attention_split", self.attention_split, f"must be a multiple of {UNIT}")
        if self.dtype not in _DTYPES:
            raise InvalidRequest("dtype", self.dtype, f"must be one of {', '.join(_DTYPES)}")
        if self.exact not in _EXACT:
            raise InvalidRequest("exact", self.exact, f"must be one of {', '.join(_EXACT)}")
        try:
            torch.device(self.device)
        except RuntimeError:
            raise InvalidRequest("device", self.device, "torch has no such device; take cpu or cuda") from None
        if self.num_threads is not None and self.num_threads < 1:
            raise InvalidRequest("num_threads", self.num_threads, "must be >= 1")
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.block_size:
            raise InvalidRequest("kv_cache_tokens", self.kv_cache_tokens, f"must be >= block_size ({self.block_size})")

        if self.learning not in (OFF, AUTO) and not (
            isinstance(self.learning, float | int) and 0 <= self.learning <= 1
        ):
            raise InvalidRequest("learning", self.learning, "must be off, auto, or a share in [0, 1]")
        if not 0 < self.gpu_memory_fraction <= 1:
            raise InvalidRequest("gpu_memory_fraction", self.gpu_memory_fraction, "must be in (0, 1]")

    def holding(self, num_blocks: int) -> EngineConfig:
        return replace(self, kv_cache_tokens=num_blocks * self.block_size)

    @property
    def table_width(self) -> int:
        """Return the number of slots that one row can own: its context and room for trees, in whole blocks."""
        return -(-(self.max_context + self.tree_slots + 1) // self.block_size) * self.block_size

    @property
    def num_blocks(self) -> int:
        tokens = self.kv_cache_tokens or self.max_sequences * self.table_width
        return tokens // self.block_size
