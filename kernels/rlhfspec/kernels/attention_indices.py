"""The indices of an attention call, as tensors on the device of its query: what kernels read of an `AttentionMeta`."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionIndices:
    """All int32; `AttentionMeta` of `kernels.tree_attention` says what they mean."""

    slots: torch.Tensor  # [N]
    table_rows: torch.Tensor  # [N]
    context_lens: torch.Tensor  # [N]
    extra: torch.Tensor  # [N, E]
    slot_table: torch.Tensor  # [R, L]
