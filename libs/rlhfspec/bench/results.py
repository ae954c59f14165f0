"""What one run of the benchmark found, as records that become JSON.

Example:
    >>> row = Row(scenario="batch-1", mode="plain", num_threads=1, tokens_per_second=80.0, repeats=(79.0, 80.0, 81.0),
    ...           accepted_per_verification=0.0)
    >>> Results(machine=None, rows=(row,)).speed(1, "batch-1", "plain")
    80.0
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from rlhfspec.bench.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One mode in one scenario. `tokens_per_second` is the median of `repeats`; prefill counts, start-up does not."""

    scenario: str
    mode: str
    num_threads: int
    tokens_per_second: float
    repeats: tuple[float, ...]
    accepted_per_verification: float
    digests: tuple[str, ...] = ()  # of the tokens and log-probs of each repetition; rivals have none
    selector: dict[str, Any] = field(default_factory=dict)  # what it said after the last repetition


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One promise: what was wanted, what came."""

    num_threads: int
    scenario: str
    name: str
    wanted: str
    found: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    machine: Machine | None
    rows: tuple[Row, ...]
    bars: tuple[Bar, ...] = ()
    costs: dict[str, Any] = field(default_factory=dict)  # cost tables by thread count, as profiled at start-up
    settings: dict[str, Any] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()  # modes that could not run, and why

    def row(self, num_threads: int, scenario: str, mode: str) -> Row | None:
        for row in self.rows:
            if (row.num_threads, row.scenario, row.mode) == (num_threads, scenario, mode):
                return row
        return None

    def speed(self, num_threads: int, scenario: str, mode: str) -> float | None:
        row = self.row(num_threads, scenario, mode)
        return row.tokens_per_second if row else None

    def best_static(self, num_threads: int, scenario: str) -> Row | None:
        return self._fastest(num_threads, scenario, "static:")

    def best_vllm(self, num_threads: int, scenario: str) -> Row | None:
        return self._fastest(num_threads, scenario, "vllm-")

    def scenes(self) -> list[tuple[int, str]]:
        """(threads, scenario) pairs in the order they ran."""
        return list(dict.fromkeys((row.num_threads, row.scenario) for row in self.rows))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    def _fastest(self, num_threads: int, scenario: str, prefix: str) -> Row | None:
        rows = [
            row
            for row in self.rows
            if (row.num_threads, row.scenario) == (num_threads, scenario) and row.mode.startswith(prefix)
        ]
        return max(rows, key=lambda row: row.tokens_per_second, default=None)
