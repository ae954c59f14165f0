"""What a step costs: tables measured at start-up, corrected by every step that follows.

A cost has a *kind* and grows with a number of rows:

    target             one forward of the target over `rows` tokens (and the context that attention reads)
    draft-first:NAME   a proposal's first level: catch-up and one level for `rows` sequences
    draft:NAME         one further level that expands `rows` nodes
    host:NAME          what is left of a step with `rows` sequences (host:plain when nothing is drafted)

Example:
    >>> costs = CostModel.profile(lambda kind, rows, kv_tokens: 0.004 + 0.0001 * rows, drafters=("model",))
    >>> [round(float(seconds), 4) for seconds in costs.target_seconds(np.array([1, 20, 1024]), 0)]
    [0.0041, 0.006, 0.1064]
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
Measure = Callable[[str, int, int], float]
"""(kind, rows, kv_tokens) -> seconds of one execution; kv_tokens is summed over the rows."""

ROW_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TARGET = "target"

_FAR_ROWS = 1 << 20  # the last knot: beyond the grid, costs go on along the last slope
_ERROR_WINDOW = 256
_LOCAL_RATE, _GLOBAL_RATE = 0.02, 0.06  # share of a (clipped) log error that one observation corrects;
# the whole table follows quicker: a machine slows down as a whole, and knots not in use must not seem cheap for that
_CLIP = 3.0  # an error beyond this many typical errors counts as this many
_DEFAULTS = {"draft-first": (2e-4, 2e-5), "draft": (2e-4, 2e-5), "host": (3e-4, 2e-6)}  # seconds: fixed, per row


def draft_kind(drafter: str, *, first: bool = False) -> str:
    """
    >>> draft_kind("model"), draft_kind("model", first=True)
    ('draft:model', 'draft-first:model')
    """
    return f"draft-first:{drafter}" if first else f"draft:{drafter}"


def host_kind(drafter: str | None) -> str:
    return f"host:{drafter or 'plain'}"


@dataclass(slots=True)
class _Errors:
    """A window of relative errors |predicted - real| / real."""

    window: Seconds = field(default_factory=lambda: np.zeros(_ERROR_WINDOW))
    count: int = 0

    def add(self, predicted: float, real: float) -> None:
        self.window[self.count % _ERROR_WINDOW] = abs(predicted - real) / max(real, 1e-9)
        self.count += 1

    def recent(self) -> Seconds:
        return self.window[: min(self.count, _ERROR_WINDOW)]


class CostTable:
    """Seconds by rows: monotone, linear between its knots, as steep as they allow beyond them; corrected online.

    The correction has a factor for the whole table and one for each knot. Both follow the logarithm of real / predicted
    slowly, with errors clipped at a few times the usual error: one step of ten times its cost moves them by
    next to nothing, while a table that is really off by two is mended within some dozens of steps.
    """

    __slots__ = ("_array", "_knots", "_rows", "_rows_array", "_seen", "_typical", "_typical_count", "factor", "per_kv")

    def __init__(self, rows: Iterable[int], seconds: Iterable[float], *, per_kv_token: float = 0.0) -> None:
        self._rows = [float(r) for r in rows]
        self._knots = [max(float(s), 1e-9) for s in seconds]
        if not self._rows or len(self._rows) != len(self._knots) or sorted(set(self._rows)) != self._rows:
            raise ValueError(f"rows: must be ascending, one for each of the seconds (got {self._rows!r})")
        for i in range(len(self._knots) - 1, 0, -1):  # noise only ever adds time: the later minimum holds
            self._knots[i - 1] = min(self._knots[i - 1], self._knots[i])
        # the steepest chord that ends there: the last piece alone may be flat for nothing but noise
        last_rows, last = self._rows[-1], self._knots[-1]
        chords = [(last - s) / (last_rows - r) for r, s in zip(self._rows[:-1], self._knots[:-1], strict=True)]
        slope = max(chords, default=0.0)
        self._rows.append(float(_FAR_ROWS))
        self._knots.append(self._knots[-1] + slope * (_FAR_ROWS - self._rows[-2]))
        self._rows_array = np.array(self._rows)
        self._array = np.array(self._knots)  # the same numbers as _knots: scalars go through lists, vectors here
        self._seen = [0] * len(self._rows)
        self._typical = 0.15  # running mean of |log error|
        self._typical_count = 0
        self.factor = 1.0
        self.per_kv = per_kv_token

    def seconds(self, rows: float, kv_tokens: float = 0.0) -> float:
        above = bisect_right(self._rows, rows)
        if above == 0:
            table = self._knots[0]
        else:
            left, low = self._rows[above - 1], self._knots[above - 1]
            table = low + (self._knots[above] - low) * (rows - left) / (self._rows[above] - left)
        return self.factor * (table + self.per_kv * kv_tokens)

    @property
    def rows(self) -> Seconds:
        """Where the knots are."""
        return self._rows_array

    @property
    def knots(self) -> Seconds:
        """Seconds there, before `factor`."""
        return self._array

    def seconds_array(self, rows: npt.ArrayLike, kv_tokens: npt.ArrayLike = 0.0) -> Seconds:
        table = np.interp(np.asarray(rows, np.float64), self._rows_array, self._array)
        if self.per_kv:
            table += self.per_kv * np.asarray(kv_tokens)
        return np.asarray(table * self.factor)

    def seconds_for_more(self, rows: int, more: Seconds, kv_tokens: float) -> Seconds:
        """Of `rows` rows that read `kv_tokens` of context, and each number of further ones."""
        table = np.interp(more + rows, self._rows_array, self._array)
        table += self.per_kv * kv_tokens
        table *= self.factor
        return np.asarray(table)

    def correct(self, rows: float, kv_tokens: float, real_seconds: float) -> float:
        """Learn from one execution; returns what had been predicted."""
        predicted = self.seconds(rows, kv_tokens)
        error = self._clipped(math.log(max(real_seconds, 1e-9) / predicted))
        self.factor *= math.exp(max(_GLOBAL_RATE, 0.5 / (4 + self._typical_count)) * error)
        above = bisect_right(self._rows, rows)
        if above == 0:
            self._scale_knot(0, error)
        else:
            left = self._rows[above - 1]
            share = (rows - left) / (self._rows[above] - left)
            self._scale_knot(above - 1, error * (1.0 - share))
            self._scale_knot(above, error * share)
        return predicted

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [int(r) for r in self._rows[:-1]],
            "seconds": [self.factor * s for s in self._knots[:-1]],
            "per_kv_token": self.factor * self.per_kv,
        }

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> CostTable:
        return cls(saved["rows"], saved["seconds"], per_kv_token=saved["per_kv_token"])

    def _clipped(self, error: float) -> float:
        limit = _CLIP * self._typical
        clipped = min(max(error, -limit), limit)
        # a little more than the limit may enter the typical error, so that a wrong table widens its own limit
        widened = min(abs(error), 2.0 * self._typical + 0.01)
        self._typical_count += 1
        self._typical += max(0.05, 1.0 / (4 + self._typical_count)) * (widened - self._typical)
        return clipped

    def _scale_knot(self, knot: int, error: float) -> None:
        """Move one knot; its neighbours give way where the table would cease to be monotone."""
        if error == 0.0:
            return
        rate = max(_LOCAL_RATE, 1.0 / (5 + self._seen[knot]))
        self._seen[knot] += 1
        knots, array = self._knots, self._array
        moved = knots[knot] * math.exp(rate * error)
        knots[knot] = array[knot] = moved
        above = knot + 1
        while above < len(knots) and knots[above] < moved:
            knots[above] = array[above] = moved
            above += 1
        below = knot - 1
        while below >= 0 and knots[below] > moved:
            knots[below] = array[below] = moved
            below -= 1


def from_below(rows: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """The largest convex curve below the measurements, at `rows` (ascending).

    Rows are free while memory is the limit and cost the same each once arithmetic is: such a curve is convex, and noise
    only ever adds time. One unlucky measurement would otherwise look like a step that no draft ever goes over, and one
    lucky one like rows that come for nothing.

    >>> from_below([1, 2, 4, 8], [1.0, 5.0, 2.5, 4.5])
    [1.0, 1.5, 2.5, 4.5]
    """
    hull: list[tuple[float, float]] = []
    for r, s in zip(rows, seconds, strict=True):
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], (r, s)):
            hull.pop()
        hull.append((r, s))
    corners, values = zip(*hull, strict=True)
    return [float(s) for s in np.interp(rows, corners, values)]


def _slope(left: tuple[float, float], right: tuple[float, float]) -> float:
    return (right[1] - left[1]) / (right[0] - left[0])


class CostModel:
    """All the tables of one engine. A kind without a table starts from a guess and learns."""

    def __init__(self, tables: dict[str, CostTable] | None = None) -> None:
        self.tables = dict(tables or {})
        self._guesses: dict[str, CostTable] = {}
        self._errors: dict[str, _Errors] = {}

    @classmethod
    def profile(
        cls,
        measure: Measure,
        *,
        drafters: Iterable[str] = (),
        host: bool = False,
        row_grid: Iterable[int] = ROW_GRID,
        repetitions: int = 3,
        kv_tokens_per_row: int = 0,
    ) -> CostModel:
        """Measure every kind over the grid: the minimum of interleaved repetitions, then its `from_below`.

        `host=True` also measures the host kinds; without it they are learnt from the steps. With `kv_tokens_per_row`
        the target is measured at long context too, which gives the price of reading one context token.
        """
        grid = tuple(row_grid)
        kinds = [TARGET]
        for name in drafters:
            kinds += [draft_kind(name, first=True), draft_kind(name)]
        if host:
            kinds += [host_kind(None), *(host_kind(name) for name in drafters)]
        best = {(kind, rows): math.inf for kind in kinds for rows in grid}
        for _ in range(repetitions):
            for kind, rows in best:
                best[kind, rows] = min(best[kind, rows], measure(kind, rows, 0))
        tables = {kind: CostTable(grid, from_below(grid, [best[kind, rows] for rows in grid])) for kind in kinds}
        if kv_tokens_per_row:
            slopes = []
            for rows in grid[:: max(len(grid) // 4, 1)]:
                kv_tokens = rows * kv_tokens_per_row
                longest = min(measure(TARGET, rows, kv_tokens) for _ in range(repetitions))
                slopes.append((longest - best[TARGET, rows]) / kv_tokens)
            tables[TARGET].per_kv = max(float(np.median(slopes)), 0.0)
        return cls(tables)

    def table(self, kind: str, *, keep: bool = True) -> CostTable:
        """The kind's table; without one, a guess, which `keep` makes the table to be corrected from now on."""
        table = self.tables.get(kind) or self._guesses.get(kind)
        if table is None:
            table = self._guesses[kind] = self._guess(kind)
        if keep:
            self.tables[kind] = table
        return table

    def _guess(self, kind: str) -> CostTable:
        family, _, name = kind.partition(":")
        if family == "draft-first" and draft_kind(name) in self.tables:
            return CostTable.from_dict(self.tables[draft_kind(name)].to_dict())
        if family in _DEFAULTS:
            fixed, per_row = _DEFAULTS[family]
            return CostTable(ROW_GRID, [fixed + per_row * rows for rows in ROW_GRID])
        raise KeyError(f"no cost table for {kind!r}; measured are {sorted(self.tables)}")

    def target_seconds(self, rows: npt.ArrayLike, kv_tokens: npt.ArrayLike = 0.0) -> Seconds:
        return self.table(TARGET).seconds_array(rows, kv_tokens)

    def draft_seconds(self, drafter: str, rows: npt.ArrayLike, *, first: bool = False) -> Seconds:
        return self.table(draft_kind(drafter, first=first)).seconds_array(rows)

    def host_seconds(self, drafter: str | None, num_sequences: float) -> float:
        return self.table(host_kind(drafter)).seconds(num_sequences)

    def observe(self, kind: str, rows: float, seconds: float, kv_tokens: float = 0.0) -> float:
        """Correct the kind's table by one execution; returns what it had predicted."""
        predicted = self.table(kind).correct(rows, kv_tokens, seconds)
        self.record_error(kind, predicted, seconds)
        return predicted

    def record_error(self, kind: str, predicted: float, real: float) -> None:
        errors = self._errors.get(kind)
        if errors is None:
            errors = self._errors[kind] = _Errors()
        errors.add(predicted, real)

    def mape(self, kind: str) -> float:
        """Mean absolute relative error over the last window; nan before the first observation."""
        recent = self._errors[kind].recent() if kind in self._errors else np.empty(0)
        return float(recent.mean()) if len(recent) else math.nan

    def median_ape(self, kind: str) -> float:
        """As mape, but the median: what the error is when nobody else uses the machine."""
        recent = self._errors[kind].recent() if kind in self._errors else np.empty(0)
        return float(np.median(recent)) if len(recent) else math.nan

    def error_kinds(self) -> list[str]:
        return sorted(self._errors)

    def to_json(self) -> str:
        return json.dumps({kind: table.to_dict() for kind, table in sorted(self.tables.items())})

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        return cls({kind: CostTable.from_dict(saved) for kind, saved in json.loads(text).items()})
