"""Rule that drafts another level while its expected tokens are worth its time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlhfspec.common.arrays import FloatArray, Floats
from rlhfspec.engine.drafting.cost import CostTable

LEVELS_AHEAD = (1, 2, 4)  # evaluated together: costs have steps that one level alone may not be worth


@dataclass(frozen=True, slots=True)
class LevelTerms:
    """Costs and expectations that a PayingLevel compares."""

    target: CostTable
    level: CostTable
    tokens_per_second: float  # value of time
    success: float  # expected accepted children per expanded node
    verified_rows: int  # rows of the verification if the draft ended now


class PayingLevel:
    """Level rule that adds a level only if its expected tokens are worth the time of drafting and verification.

    >>> flat, level = CostTable([1, 100], [0.01, 0.01]), CostTable([1, 100], [0.001, 0.001])
    >>> rule = PayingLevel(LevelTerms(flat, level, tokens_per_second=100.0, success=0.8, verified_rows=2))
    >>> [rule.go_on(frontier_acceptance=np.array([a], np.float32), num_rows=1, level=2) for a in (0.9, 0.1)]
    [True, False]
    """

    def __init__(self, terms: LevelTerms) -> None:
        self.terms = terms  # read by a draft that runs all levels in one call; it then fills `level_rows`
        self.level_rows: list[int] = []  # of each level after the first

    def go_on(self, *, frontier_acceptance: FloatArray, num_rows: int, level: int) -> bool:
        chances = frontier_acceptance.astype(np.float64)
        pays = any(self._pays(chances, num_rows, ahead) for ahead in LEVELS_AHEAD)
        if pays:
            self.level_rows.append(num_rows)
        return pays

    def _pays(self, chances: Floats, num_rows: int, ahead: int) -> bool:
        terms, verified = self.terms, self.terms.verified_rows + sum(self.level_rows)
        seconds = terms.target.seconds(verified + ahead * num_rows) - terms.target.seconds(verified)
        price = terms.tokens_per_second * seconds / (ahead * num_rows)  # tokens that one more row must gain
        worth, success = 0.0, 1.0
        for _ in range(ahead):
            success *= terms.success
            worth += float(np.maximum(chances * success - price, 0.0).sum())  # nodes that do not pay are not verified
        return worth > ahead * terms.tokens_per_second * terms.level.seconds(num_rows)
