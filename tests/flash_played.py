"""Mathematical stand-in for torch's GPU-only `varlen_attn`."""

from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from rlhfspec.kernels import flash


def played(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, cu_seq_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool,
) -> torch.Tensor:  # fmt: skip
    """Compute `varlen_attn` by its documentation: the last query of a sequence stands at its last key."""
    assert window_size[1] == 0
    starts, key_starts = cu_seq_q.tolist(), cu_seq_k.tolist()
    counts = [stop - start for start, stop in pairwise(starts)]
    key_counts = [stop - start for start, stop in pairwise(key_starts)]
    assert (max(counts), max(key_counts), starts[-1], key_starts[-1]) == (max_q, max_k, len(query), len(key))
    assert enable_gqa is (query.shape[1] != key.shape[1])
    repeats = query.shape[1] // key.shape[1]
    out = []
    for place, (count, size) in enumerate(zip(counts, key_counts, strict=True)):
        q = query[starts[place] :][:count].float()
        k, v = (each[key_starts[place] :][:size].float().repeat_interleave(repeats, 1) for each in (key, value))
        at, seen = (torch.arange(length, device=query.device) for length in (count, size))
        at = at[:, None] + size - count
        hidden = seen > at
        if window_size[0] >= 0:
            hidden |= seen < at - window_size[0]
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(2), v))
    return torch.cat(out).to(query.dtype)


def have_flash(patch: pytest.MonkeyPatch, attention: Any = played, *, least_rows: int | None = None) -> None:
    """Give every device a FlashAttention `attention` for float32 and any head size, with chunks of `least_rows`."""
    from rlhfspec.engine.forward import runner

    patch.setenv("RLHFSPEC_KEPT", "")  # what was proved has another
    patch.setattr(flash, "has_flash", lambda device: True)
    patch.setattr(flash, "varlen_attn", attention)
    patch.setattr(flash, "_FLASH_DTYPES", (torch.float32, torch.bfloat16))
    patch.setattr(flash, "_HEAD_UNIT", 1)
    if least_rows is not None:
        patch.setattr(runner, "LEAST_ROWS", least_rows)


def _first(*row: Any, window_size: tuple[int, int], **how: Any) -> torch.Tensor:
    """Put queries at the first keys instead of the last, as older versions did."""
    return played(*row, window_size=(0, 0), **how)


def _failing(*row: Any, **how: Any) -> torch.Tensor:
    raise RuntimeError("no kernel image is available")


WRONG = ((_first, "is off by"), (_failing, "no kernel image is available"))  # and what is said of it


def played_there(second: ModuleType) -> Any:
    def attend(*row: Any, **how: Any) -> torch.Tensor:
        out = torch.empty_like(row[0], memory_format=torch.contiguous_format)
        here = [second.opened(each.contiguous()) if isinstance(each, torch.Tensor) else each for each in row]
        second.opened(out).copy_(played(*here, **how))
        return out

    return attend
