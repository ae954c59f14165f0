"""What `rlhfspec bench migrate` found: medians of every cell, and the bars.

Example: a pause of a step of 10 ms and 3 ms more is within what is promised over shared memory.
    >>> move = Moment(pause=0.013, gap=0.02, seconds=0.02, num_bytes=4_700_000, cpu=0.0015,
    ...               engine_cpu=0.001, held=0.001, step=0.01)
    >>> cell = Cell(model="wide", decoding="plain", link="shm", num_tokens=1024, moves=(move,), prefill_gaps=(0.5,))
    >>> [(bar.name, bar.found, bar.holds) for bar in bars([cell])][0]
    ('pause', '13.0 ms', True)
    >>> [bar.found for bar in bars([cell]) if "re-prefill" in bar.name]
    ['25.0x']
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rlhfspec.bench.links import LinkCost
from rlhfspec.bench.processor import Processor
from rlhfspec.bench.results import Bar

MORE_THAN_A_STEP = {"shm": 0.005, "tcp": 0.008}  # seconds that a pause may take beyond one step of the destination
MOST_CPU = {"shm": 0.002, "tcp": 0.004}  # of both ends, a move of 4.7 MB
CPU_TOKENS = 1024  # where the 77M model has 4.7 MB
TIMES_SHORTER = {512: 10.0, 1024: 20.0}  # than computing the KV again, the gap


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One move. Seconds: pause, from the source's letting go to its being there; gap, from the last token here to the
    first there; of the whole move; CPU of both ends beyond what they take without, and what of it was in the engines'
    threads; the longest that an engine was held between two steps; and a step of the destination."""

    pause: float
    gap: float
    seconds: float
    num_bytes: int
    cpu: float
    engine_cpu: float
    held: float
    step: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """prefill_gaps: of the same sequence when its KV is computed again, beside the same others."""

    model: str
    decoding: str
    link: str
    num_tokens: int
    moves: tuple[Moment, ...]
    prefill_gaps: tuple[float, ...]
    kept: tuple[str, ...] = ()  # why moves did not come about

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
        """From how many tokens on a move's gap is the shorter one, if prefill takes equally long for each token."""
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
class MigrateResults:
    machine: Processor
    settings: dict[str, Any]
    cells: tuple[Cell, ...]
    links: tuple[LinkCost, ...]  # without engines, beside a plain copy and a plain socket
    skipped: tuple[str, ...] = ()

    def to_json(self) -> str:
        cells = [asdict(cell) | {"medians": cell.summary()} for cell in self.cells]
        found = {"cells": cells, "bars": [asdict(bar) for bar in bars(self.cells)]}
        return json.dumps(asdict(self) | found, indent=1)


def bars(cells: Iterable[Cell]) -> list[Bar]:
    return [bar for cell in cells for bar in _bars_of(cell)]


def _bars_of(cell: Cell) -> list[Bar]:
    found = []
    pause, step = cell.median("pause"), cell.median("step")
    if cell.link in MORE_THAN_A_STEP:
        most = step + MORE_THAN_A_STEP[cell.link]
        found.append(_bar(cell, "pause", f"<= {_ms(most)}", _ms(pause), pause <= most))
    if cell.num_tokens in TIMES_SHORTER:
        least, times = TIMES_SHORTER[cell.num_tokens], cell.times_shorter
        found.append(_bar(cell, "gap of re-prefill / of the move", f">= {least:g}x", f"{times:.1f}x", times >= least))
    if cell.link in MOST_CPU and cell.num_tokens == CPU_TOKENS and cell.model == "wide":
        cpu, limit = cell.median("cpu"), MOST_CPU[cell.link]
        found.append(_bar(cell, "CPU of both ends", f"<= {_ms(limit)}", _ms(cpu), cpu <= limit))
    held = cell.median("held")
    found.append(_bar(cell, "an engine held", f"<= a step ({_ms(step)})", _ms(held), held <= step))
    return found


def _bar(cell: Cell, name: str, wanted: str, found: str, holds: bool) -> Bar:
    scenario = f"{cell.model}, {cell.decoding}, {cell.num_tokens} tokens, {cell.link}"
    return Bar(num_threads=1, scenario=scenario, name=name, wanted=wanted, found=found, holds=holds)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms"
