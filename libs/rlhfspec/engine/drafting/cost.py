"""Cost model of a step: seconds by kind of work and rows, measured at start-up and rescaled at every step.

Kinds of cost:

    target             one forward of the target over `rows` tokens (and the context that attention reads)
    draft-first:NAME   a draft's first level: a row per sequence, and per token the draft model has yet to run
    draft:NAME         one further level that expands `rows` nodes
    host:NAME          the rest of a step with `rows` sequences (host:plain without a draft)
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
Measure = Callable[[str, int, int], float]
"""(kind, rows, kv_tokens) -> seconds of one execution; kv_tokens is summed over the rows."""

ROW_GRID = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
TARGET = "target"

_FAR_ROWS = 1 << 20  # the last knot: costs beyond the grid follow the steepest slope
_RATE, _MOST_ERROR = 0.06, 0.3  # share of a log error that one step corrects; the largest error counted
_ERROR_WINDOW = 256
GUESSED_TARGET = 4e-3, 1e-4  # seconds: fixed, per row
_GUESSES = {TARGET: GUESSED_TARGET, "draft-first": (2e-4, 2e-5), "draft": (2e-4, 2e-5), "host": (3e-4, 2e-6)}


def draft_kind(drafter: str, *, first: bool = False) -> str:
    return f"draft-first:{drafter}" if first else f"draft:{drafter}"


def host_kind(drafter: str | None) -> str:
    return f"host:{drafter or 'plain'}"


class CostTable:
    """Piecewise linear function from rows to seconds, times `factor`, which tracks real over predicted time."""

    __slots__ = ("factor", "knots", "num_seen", "per_kv", "rows")

    def __init__(self, rows: Iterable[int], seconds: Iterable[float], *, per_kv_token: float = 0.0) -> None:
        self.rows: Seconds = np.array([*rows, _FAR_ROWS], np.float64)
        measured = np.maximum(np.array(list(seconds), np.float64), 1e-9)
        if len(measured) < 1 or len(self.rows) != len(measured) + 1 or (np.diff(self.rows) <= 0).any():
            raise ValueError(f"rows: must be ascending, one for each of the seconds (got {self.rows[:-1].tolist()})")
        measured = np.minimum.accumulate(measured[::-1])[::-1]  # noise only adds time: the later minimum holds
        # the steepest chord that ends there: the last piece alone may be flat by noise
        chords = (measured[-1] - measured[:-1]) / (self.rows[-2] - self.rows[:-2])
        far = measured[-1] + chords.max(initial=0.0) * (_FAR_ROWS - self.rows[-2])
        self.knots: Seconds = np.append(measured, far)  # before `factor`
        self.per_kv = per_kv_token
        self.factor = 1.0
        self.num_seen = 50  # 0 for a guess, whose first steps correct it faster

    def seconds(self, rows: float, kv_tokens: float = 0.0) -> float:
        return float(self.seconds_array(rows, kv_tokens))

    def seconds_array(self, rows: npt.ArrayLike, kv_tokens: npt.ArrayLike = 0.0) -> Seconds:
        return np.asarray(
            (np.interp(np.asarray(rows, np.float64), self.rows, self.knots) + np.multiply(self.per_kv, kv_tokens))
            * self.factor
        )

    def correct(self, predicted: float, real: float) -> None:
        self.num_seen += 1
        rate, most = max(_RATE, 1.0 / (1 + self.num_seen)), _MOST_ERROR + 1.0 / self.num_seen
        error = math.log(max(real, 1e-9) / predicted)
        self.factor *= math.exp(rate * min(max(error, -most), most))

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows[:-1].astype(int).tolist(),
            "seconds": (self.factor * self.knots[:-1]).tolist(),
            "per_kv_token": self.factor * self.per_kv,
        }


def from_below(rows: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Return the largest convex curve below the measurements, since costs are convex and noise only adds time.

    >>> from_below([1, 2, 4, 8], [1.0, 5.0, 2.5, 4.5])
    [1.0, 1.5, 2.5, 4.5]
    """
    hull: list[tuple[float, float]] = []
    for r, s in zip(rows, seconds, strict=True):
        while len(hull) > 1:
            (r0, s0), (r1, s1) = hull[-2:]
            if (s1 - s0) * (r - r0) < (s - s0) * (r1 - r0):
                break
            hull.pop()  # the last corner lies above the line
        hull.append((r, s))
    corners, values = zip(*hull, strict=True)
    return [float(s) for s in np.interp(rows, corners, values)]


class CostModel:
    def __init__(self, tables: dict[str, CostTable] | None = None) -> None:
        self.tables = dict(tables or {})
        self._errors: dict[str, deque[float]] = {}  # by kind: the last relative errors

    @classmethod
    def profile(
        cls,
        measure: Measure,
        *,
        drafters: Iterable[str] = (),
        row_grid: Iterable[int] = ROW_GRID,
        repetitions: int = 3,
        kv_tokens_per_row: int = 0,
    ) -> CostModel:
        """Time target and drafters over a grid of rows, and fit a convex curve to the fastest repetitions.

        `kv_tokens_per_row` adds a long context, to measure the cost of a context token.
        """
        grid = tuple(row_grid)
        kinds = [TARGET, *(draft_kind(name, first=first) for name in drafters for first in (True, False))]
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
        """Return the cost table of a kind. An unmeasured one is guessed, and stored if `keep`."""
        if kind not in self.tables:
            family = kind.partition(":")[0]
            if family not in _GUESSES:
                raise KeyError(f"no cost table for {kind!r}; measured are {sorted(self.tables)}")
            fixed, per_row = _GUESSES[family]
            guess = CostTable(ROW_GRID, [fixed + per_row * rows for rows in ROW_GRID])
            guess.num_seen = 0
            if not keep:
                return guess
            self.tables[kind] = guess
        return self.tables[kind]

    def host_seconds(self, drafter: str | None, num_sequences: float) -> float:
        return self.table(host_kind(drafter)).seconds(num_sequences)

    def plain_seconds(self, num_sequences: int, num_prefill_rows: int, kv_tokens: int) -> float:
        """Return the seconds of a step without drafts, excluding prefill rows, which must run anyway."""
        target = self.table(TARGET).seconds(num_sequences + num_prefill_rows, kv_tokens)
        return target - self.owed_seconds(num_prefill_rows) + self.host_seconds(None, num_sequences)

    def step_seconds(self, rows: npt.ArrayLike, kv_tokens: npt.ArrayLike) -> Seconds:
        """Return the seconds of whole steps without drafts, by a guess where nothing was measured."""
        target = self.table(TARGET, keep=False).seconds_array(rows, kv_tokens)
        return target + self.table(host_kind(None), keep=False).seconds_array(rows)

    def owed_seconds(self, num_prefill_rows: int) -> float:
        return self.table(TARGET).seconds(num_prefill_rows) if num_prefill_rows else 0.0

    def level_share(self, drafter: str, num_rows: int) -> float | None:
        """Return the cost of one more level over that of a verification, or None if the drafter has no levels."""
        level = self.tables.get(draft_kind(drafter))
        return None if level is None else level.seconds(num_rows) / self.table(TARGET).seconds(num_rows)

    def catch_up_seconds(self, drafter: str, num_sequences: int, num_unseen: int) -> float:
        table = self.table(draft_kind(drafter, first=True))
        return table.seconds(num_sequences + num_unseen) - table.seconds(num_sequences)

    def observe(self, kind: str, rows: float, seconds: float, kv_tokens: float = 0.0) -> float:
        table = self.table(kind)
        predicted = table.seconds(rows, kv_tokens)
        table.correct(predicted, seconds)
        self.record_error(kind, predicted, seconds)
        return predicted

    def observe_draft(self, drafter: str, first_rows: int, level_rows: list[int], seconds: float) -> float:
        kinds = draft_kind(drafter, first=True), draft_kind(drafter)
        tables = [self.table(kind) for kind in kinds[: 2 if level_rows else 1]]
        predicted = tables[0].seconds(first_rows)
        if level_rows:
            predicted += float(tables[1].seconds_array(level_rows).sum())
        for table in tables:
            table.correct(predicted, seconds)
        self.record_error(kinds[1], predicted, seconds)
        return predicted

    def record_error(self, kind: str, predicted: float, real: float) -> None:
        errors = self._errors.setdefault(kind, deque(maxlen=_ERROR_WINDOW))
        errors.append(abs(predicted - real) / max(real, 1e-9))

    def errors(self) -> dict[str, float]:
        return {kind: sum(errors) / len(errors) for kind, errors in sorted(self._errors.items())}
