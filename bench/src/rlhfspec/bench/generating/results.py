"""Results of a benchmark, which become JSON.

Example:
    >>> row = ResultRow(scenario="batch-1", mode="plain", num_threads=1, tokens_per_second=80.0,
    ...                 repeats=(79.0, 80.0, 81.0), accepted_per_verification=0.0)
    >>> Results(machine=None, rows=(row,)).row(1, "batch-1", "plain").tokens_per_second
    80.0
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhfspec.bench.processor import Processor


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultRow:
    """Result of one mode in one scenario. `tokens_per_second` is the median of `repeats`, without start-up."""

    scenario: str
    mode: str
    num_threads: int
    tokens_per_second: float
    repeats: tuple[float, ...]
    accepted_per_verification: float
    digests: tuple[str, ...] = ()  # of the tokens and log-probs of each repetition; rivals have none
    selector: dict[str, Any] = field(default_factory=dict)  # its statistics after the last repetition


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    num_threads: int
    scenario: str
    name: str
    wanted: str
    found: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResults:
    """Common part of all results: machine, settings, bars and skipped modes."""

    machine: Processor | None
    settings: dict[str, Any] = field(default_factory=dict)
    bars: tuple[Bar, ...] = ()
    skipped: tuple[str, ...] = ()  # what could not run, and why

    @property
    def cpu(self) -> str:
        return "" if self.machine is None else self.machine.cpu

    @property
    def arithmetic(self) -> str:
        return "" if self.machine is None else self.machine.arithmetic

    def content(self) -> dict[str, Any]:
        return asdict(self)

    def to_json(self) -> str:
        return json.dumps(self.content(), indent=1)


def published(settings: Any, *paths: str) -> dict[str, Any]:
    """Return the settings as JSON content, with the fields named in `paths` shortened to folder names."""
    names = {name: Path(path).name for name in paths if (path := getattr(settings, name))}
    return asdict(settings) | names


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(BenchResults):
    rows: tuple[ResultRow, ...]
    costs: dict[str, Any] = field(default_factory=dict)  # cost tables by thread count, as profiled at start-up

    def row(self, num_threads: int, scenario: str, mode: str) -> ResultRow | None:
        for row in self.rows:
            if (row.num_threads, row.scenario, row.mode) == (num_threads, scenario, mode):
                return row
        return None

    def statics(self, num_threads: int, scenario: str) -> list[ResultRow]:
        return self._rows_of(num_threads, scenario, "static:")

    def best_vllm(self, num_threads: int, scenario: str) -> ResultRow | None:
        rows = self._rows_of(num_threads, scenario, "vllm-")
        return max(rows, key=lambda row: row.tokens_per_second, default=None)

    def scenes(self) -> list[tuple[int, str]]:
        """Return (threads, scenario) pairs in run order."""
        return list(dict.fromkeys((row.num_threads, row.scenario) for row in self.rows))

    def _rows_of(self, num_threads: int, scenario: str, prefix: str) -> list[ResultRow]:
        at = num_threads, scenario
        return [row for row in self.rows if (row.num_threads, row.scenario) == at and row.mode.startswith(prefix)]


def to_json(results: Mapping[str, Results]) -> str:
    """Return the results by pair of models as JSON."""
    return json.dumps({pair: found.content() for pair, found in results.items()}, indent=1)
