"""Record of a selector's decisions and their outcomes."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from rlhfspec.engine.drafting.base import DraftOutcome
from rlhfspec.engine.drafting.cost import CostModel

_NUM_DECISIONS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    plan: str
    is_trial: bool  # to learn, not because it looked best
    num_sequences: int
    num_prefill_rows: int
    num_proposed: int  # nodes drafted
    num_verified: int  # nodes kept by the budget: N
    predicted_accepted: float
    accepted: int
    predicted_seconds: float
    seconds: float
    selector_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    decisions: tuple[Decision, ...]  # the last ones, oldest first
    cost_errors: dict[str, float]  # by kind of cost, and "step": the mean of |predicted - real| / real
    share_of_step: float
    rates: Mapping[str, float]  # tokens/s by plan at the last look, best first; of an adaptive selector


class Journal:
    def __init__(self, costs: CostModel | None) -> None:
        self._costs = costs
        self._decisions: deque[Decision] = deque(maxlen=_NUM_DECISIONS)
        self._selector_seconds = 0.0  # of the current step
        self.start_totals()

    def start_totals(self) -> None:
        self._total_selector_seconds = self._total_seconds = 0.0

    def spend(self, started: float) -> None:
        self._selector_seconds += perf_counter() - started

    def close(self, outcome: DraftOutcome, *, is_trial: bool, predicted_seconds: float, started: float) -> None:
        if self._costs is not None:
            self._costs.record_error("step", predicted_seconds, outcome.step_seconds)
        self.spend(started)
        self._decisions.append(
            Decision(
                plan=outcome.plan.name,
                is_trial=is_trial,
                num_sequences=len(outcome.state.rows),
                num_prefill_rows=outcome.state.num_prefill_rows,
                num_proposed=outcome.num_proposed,
                num_verified=outcome.forest.size,
                predicted_accepted=outcome.choice.predicted_accepted if outcome.choice else 0.0,
                accepted=int(np.count_nonzero(outcome.accepted)),
                predicted_seconds=predicted_seconds,
                seconds=outcome.step_seconds,
                selector_seconds=self._selector_seconds,
            )
        )
        self._total_seconds += outcome.step_seconds
        self._total_selector_seconds += self._selector_seconds
        self._selector_seconds = 0.0

    def explain(self, rates: Mapping[str, float]) -> Explanation:
        return Explanation(
            decisions=tuple(self._decisions),
            cost_errors=self._costs.errors() if self._costs is not None else {},
            share_of_step=self._total_selector_seconds / self._total_seconds if self._total_seconds else 0.0,
            rates=rates,
        )
