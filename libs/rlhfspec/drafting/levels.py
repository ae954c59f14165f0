"""Between two levels of a draft: is one more worth its time?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rlhfspec.arrays import FloatArray, Floats
from rlhfspec.drafting.cost import CostTable

LEVELS_AHEAD = (1, 2, 4)  # looked at together


@dataclass(frozen=True, slots=True)
class LevelTerms:
    """What a PayingLevel decides by, for a draft that runs all its levels in one call."""

    target: CostTable
    level: CostTable
    tokens_per_second: float
    success: float
    verified_rows: int


class Always:
    """The level rule of a static plan."""

    def go_on(self, *, frontier_acceptance: FloatArray, num_rows: int, level: int) -> bool:
        return True


class PayingLevel:
    """One more level only if its tokens pay for its draft and for its rows in the verification.

    `rows`: of the verification if the draft ended now. `tokens_per_second`: what time is worth.
    `success`: expected accepted children of an expanded node. Also times the levels, by `clock`.

    Example:
        >>> flat, level = CostTable([1, 100], [0.01, 0.01]), CostTable([1, 100], [0.001, 0.001])
        >>> rule = PayingLevel(flat, level, rows=2, tokens_per_second=100.0, success=0.8, clock=lambda: 0.0)
        >>> [rule.go_on(frontier_acceptance=np.array([a], np.float32), num_rows=1, level=2) for a in (0.9, 0.1)]
        [True, False]
    """

    __slots__ = (
        "_clock",
        "_last",
        "_level_table",
        "_rate",
        "_rows",
        "_started",
        "_success",
        "_target",
        "levels",
    )

    def __init__(
        self,
        target: CostTable,
        level_table: CostTable,
        *,
        rows: int,
        tokens_per_second: float,
        success: float,
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._level_table = level_table
        self._rate = tokens_per_second
        self._success = success
        self._rows = rows
        self._clock = clock
        self.levels: list[tuple[int, float]] = []  # (rows, seconds) of each level so far; rows 0: the first
        self._started = self._last = clock()

    def go_on(self, *, frontier_acceptance: FloatArray, num_rows: int, level: int) -> bool:
        self._end_level(self._clock() - self._last)
        pays = self._pays(frontier_acceptance.astype(np.float64), num_rows)
        if pays:
            self._rows += num_rows
            self.levels.append((num_rows, -1.0))
        self._last = self._clock()
        return pays

    def _pays(self, chances: Floats, num_rows: int) -> bool:
        """Does it, alone or with the next levels? Costs have steps that one level alone may not be worth."""
        level_price = self._rate * self._level_table.seconds(num_rows)
        now = self._target.seconds(self._rows)
        for ahead in LEVELS_AHEAD:
            seconds = self._target.seconds(self._rows + ahead * num_rows) - now
            price = self._rate * seconds / (ahead * num_rows)  # tokens that one more row must bring
            worth, success = 0.0, 1.0
            for _ in range(ahead):
                success *= self._success
                # rows that do not pay need not be verified
                worth += float(np.maximum(chances * success - price, 0.0).sum())
            if worth > ahead * level_price:
                return True
        return False

    def terms(self) -> LevelTerms:
        """For a draft that asks by itself; it then says what it ran (`ran`)."""
        return LevelTerms(self._target, self._level_table, self._rate, self._success, self._rows)

    def ran(self, levels: list[tuple[int, float]]) -> None:
        """(rows, seconds) of each level behind the first."""
        self.levels = [(0, -1.0), *levels]

    def finish(self, draft_seconds: float) -> list[tuple[int, float]]:
        """The levels; the one that nobody timed took what is left of the draft. No levels if nobody asked."""
        if self.levels and self.levels[0][1] < 0.0:
            rest = draft_seconds - sum(seconds for _, seconds in self.levels[1:])
            self.levels[0] = (0, max(rest, 1e-7))
        elif self.levels and self.levels[-1][1] < 0.0:
            self._end_level(max(draft_seconds - (self._last - self._started), 1e-7))
        return self.levels

    def _end_level(self, seconds: float) -> None:
        if self.levels:
            self.levels[-1] = (self.levels[-1][0], seconds)
        else:
            self.levels.append((0, seconds))
