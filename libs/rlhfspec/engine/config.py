"""Settings of the engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rlhfspec.engine.drafting.base import DraftPlan
from rlhfspec.errors import InvalidRequest
from rlhfspec.job.choices.drafters import AUTO, OFF
from rlhfspec.kernels.attention_splits import SPLIT, UNIT

_ENGINE_DTYPES = ("float32", "bfloat16", "float64")
_EXACT = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the engine, checked at construction.

    Tokens depend on weights, `dtype`, `arithmetic` and, in longer contexts, `attention_split`. A GPU is batch-invariant
    only if `exact` is "on". Without `kv_cache_tokens`, rows have room for a full context, as far as GPU memory allows.
    """

    dtype: str = "float32"  # float32, bfloat16 or float64 (slow reference, torch kernels only)
    device: str = "cpu"  # any device that torch has
    arithmetic: str = "auto"  # auto, fma, amx, dpbf16 or torch: how CPU linear layers add up (docs/law.md)
    exact: str = "auto"  # auto, on or off (docs/law.md)
    attention_split: int = SPLIT  # positions per softmax
    speculation: str | DraftPlan = "adaptive"  # off, a drafter's name, adaptive, or a static strategy
    learning: str | float = OFF  # off, auto (while it pays), or a share of step time besides idle time
    num_threads: int | None = None  # CPU threads of the kernels; None: torch's setting
    max_sequences: int = 64  # rows decoded together
    max_context: int = 1024  # tokens of prompt and response
    kv_cache_tokens: int | None = None  # memory for KV
    gpu_memory_fraction: float = 0.85  # of this process, weights included
    block_size: int = 16  # tokens, a power of two
    prefill_chunk: int = 512  # prompt tokens run per step
    prefix_sharing: bool = True  # samples of one prompt share its whole blocks
    target_tpot: float | None = None  # seconds per token of requests with priority; None: TIMES_ALONE in pausing.py
    tree_slots: int = 64  # spare slots of a sequence for tree nodes
    profile: bool = True  # measure the cost tables at start; otherwise the selector learns while running

    def __post_init__(self) -> None:
        if self.max_context < 2:
            raise InvalidRequest("max_context", self.max_context, "must be >= 2: a prompt token and a response token")
        positive = ("max_sequences", "prefill_chunk", "block_size")
        for name in positive:
            if getattr(self, name) < 1:
                raise InvalidRequest(name, getattr(self, name), "must be >= 1")
        if self.block_size & (self.block_size - 1):
            raise InvalidRequest("block_size", self.block_size, "must be a power of two")
        if self.attention_split < UNIT or self.attention_split % UNIT:
            raise InvalidRequest("attention_split", self.attention_split, f"must be a multiple of {UNIT}")
        if self.dtype not in _ENGINE_DTYPES:
            raise InvalidRequest("dtype", self.dtype, f"must be one of {', '.join(_ENGINE_DTYPES)}")
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
        if self.target_tpot is not None and not self.target_tpot > 0:
            raise InvalidRequest("target_tpot", self.target_tpot, "must be > 0")
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
        """Return the most KV slots of a row: for its context and tree nodes, in whole blocks."""
        return -(-(self.max_context + self.tree_slots + 1) // self.block_size) * self.block_size

    @property
    def num_blocks(self) -> int:
        tokens = self.kv_cache_tokens or self.max_sequences * self.table_width
        return tokens // self.block_size
