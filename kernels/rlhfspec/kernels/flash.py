"""16-bit FlashAttention on a GPU by torch's `varlen_attn`. KV is contiguous, because pages must have 256 positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

_LARGEST_HEAD, _HEAD_UNIT = 256, 8
_FLASH_DTYPES = (torch.bfloat16, torch.float16)
_TOLERANCE = 2e-2  # relative to the largest number; bfloat16 has 8 bits


def has_flash(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def why_not(
    device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int, *,
    chunk: int | None = None, softcap: float = 0.0, has_sinks: bool = False,
) -> str:  # fmt: skip
    """Return why FlashAttention cannot run this attention, or an empty string."""
    if not has_flash(device):
        return f"{device.type} has no FlashAttention"
    if dtype not in _FLASH_DTYPES:
        return f"FlashAttention does not support {str(dtype).removeprefix('torch.')}"
    refused = {"chunked attention": chunk is not None, "soft caps": bool(softcap), "sinks": has_sinks}
    if unknown := [name for name, is_there in refused.items() if is_there]:
        return f"FlashAttention does not support {unknown[0]}"
    if key_dim != value_dim or key_dim > _LARGEST_HEAD or key_dim % _HEAD_UNIT:
        sizes = f"{key_dim}" + (f" and {value_dim}" if key_dim != value_dim else "")
        return f"FlashAttention does not support heads of size {sizes}"
    return ""


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, most: int, most_keys: int,
    *, scale: float, window: int | None,
) -> Tensor:  # fmt: skip
    """Run causal attention for each sequence, aligning its last query with its last key.

    query [T, H, D]; key, value [K, Hkv, D]; starts, key_starts [n + 1] int32; most, most_keys: most queries and keys
    of a sequence; `window` includes the query's own key.
    """
    out = varlen_attn(
        query, key, value, starts, key_starts, most, most_keys, scale=scale,
        window_size=(-1 if window is None else window - 1, 0), enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out


def disagreement(flash: Callable[[], Tensor], twin: Callable[[], Tensor]) -> str:
    """Return the error or excessive difference of `flash` from the reference `twin`, or an empty string."""
    try:
        with torch.no_grad():
            found, wanted = flash(), twin()
    except (RuntimeError, NotImplementedError) as error:
        return f"varlen_attn says {next(iter(str(error).strip().splitlines()), type(error).__name__)}"
    difference = float((found.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    return "" if difference <= _TOLERANCE else f"varlen_attn is off by {difference:.1e}"
