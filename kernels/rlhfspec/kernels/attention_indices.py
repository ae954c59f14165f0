"""Index tensors that attention kernels read, on the device of the query."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionIndices:
    slots: torch.Tensor  # [N]
    table_rows: torch.Tensor  # [N]
    context_lens: torch.Tensor  # [N]
    extra: torch.Tensor  # [N, E]
    slot_table: torch.Tensor  # [R, L]
