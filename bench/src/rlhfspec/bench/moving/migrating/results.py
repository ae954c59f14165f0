"""Results of `rlhfspec bench migrate`: cells and their medians."""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass
from typing import Any

from rlhfspec.bench.generating.results import BenchResults
from rlhfspec.bench.links import LinkCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Measurements of one move. Times are in seconds."""

    pause: float  # from the source's release until it is at the destination
    gap: float  # from the last token at the source to the first at the destination
    seconds: float  # of the whole move
    num_bytes: int
    cpu: float  # of both ends, beyond what they take without it
    engine_cpu: float  # the part of it in the engines' threads
    held: float  # longest that an engine was held between two steps
    step: float  # of the destination


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Moves of one model, decoding mode, link and sequence length."""

    model: str
    decoding: str
    link: str
    num_tokens: int
    moves: tuple[Moment, ...]
    prefill_gaps: tuple[float, ...]  # when its KV is computed again, beside the same others
    kept: tuple[str, ...] = ()  # why moves failed

    def median(self, name: str) -> float:
        return float(statistics.median(getattr(move, name) for move in self.moves))

    @property
    def prefill_gap(self) -> float:
        return statistics.median(self.prefill_gaps)

    @property
    def times_shorter(self) -> float:
        return self.prefill_gap / self.median("gap")

    @property
    def cpu_per_mb(self) -> float:
        return self.median("cpu") / (self.median("num_bytes") / 1e6)

    @property
    def break_even_tokens(self) -> float:
        """Return the number of tokens from which a move's gap is shorter than recomputing, if prefill is linear."""
        step = self.median("step")
        prefill_token = max(self.prefill_gap - step, 1e-9) / self.num_tokens
        return max(self.median("gap") - step, 0.0) / prefill_token

    def summary(self) -> dict[str, Any]:
        names = ("pause", "gap", "seconds", "num_bytes", "cpu", "engine_cpu", "held", "step")
        told = {name: self.median(name) for name in names}
        return told | {
            "longest_held": max(move.held for move in self.moves),
            "prefill_gap": self.prefill_gap,
            "times_shorter": self.times_shorter,
            "cpu_per_mb": self.cpu_per_mb,
            "break_even_tokens": self.break_even_tokens,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrateResults(BenchResults):
    cells: tuple[Cell, ...]
    links: tuple[LinkCost, ...]  # without engines, beside a plain copy and a plain socket

    def content(self) -> dict[str, Any]:
        return asdict(self) | {"cells": [asdict(cell) | {"medians": cell.summary()} for cell in self.cells]}
