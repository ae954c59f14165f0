"""Rotary tables: cos and sin of every position, computed once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_Tables = tuple[Tensor, ...]  # each [positions, D]


class RotaryTable(nn.Module):
    """Table that replaces a rotary embedding module, or runs it if its output is not one vector per position."""

    def __init__(self, original: nn.Module, max_context: int) -> None:
        super().__init__()
        self.original = original
        self.max_context = max_context
        self._tables: dict[tuple[Any, ...], _Tables | None] = {}

    def __getattr__(self, name: str) -> Any:
        """Return the replaced embedding's attribute."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return cos and sin [1, N, D] at position_ids [1, N]. Only the type and device of x matter."""
        key = (x.dtype, x.device, *args, *sorted(kwargs.items()))
        if key not in self._tables:
            self._tables[key] = self._make(x, args, kwargs)
        tables = self._tables[key]
        if tables is None or position_ids.ndim != 2 or len(position_ids) != 1:
            return self.original(x, position_ids, *args, **kwargs)
        return tuple(table.index_select(0, position_ids[0])[None] for table in tables)

    def tables(self, dtype: torch.dtype) -> _Tables | None:
        """Return cos and sin [positions, D], or None unless exactly one pair was computed for this dtype."""
        found = [tables for key, tables in self._tables.items() if key[0] == dtype]
        return found[0] if len(found) == 1 and found[0] is not None and len(found[0]) == 2 else None

    def held(self) -> Iterator[Tensor]:
        for tables in self._tables.values():
            yield from tables or ()

    def _make(self, x: Tensor, args: Any, kwargs: Any) -> _Tables | None:
        positions = torch.arange(self.max_context, device=x.device)
        found = self.original(x, positions[None], *args, **kwargs)
        fits = isinstance(found, tuple) and all(
            isinstance(table, Tensor) and table.ndim == 3 and table.shape[:2] == (1, len(positions)) for table in found
        )
        return tuple(table[0].contiguous() for table in found) if fits else None
