"""Buffer of several steps' outcomes, learnt together because one numpy call is cheaper."""

from __future__ import annotations

import numpy as np

from rlhfspec.engine.drafting.acceptance import AcceptanceModel
from rlhfspec.engine.drafting.base import DraftOutcome

_STEPS = 8  # between two updates
_LARGE_BATCH, _LARGE_STEPS, _LARGE_STRIDE = 32, 32, 8


class OutcomeBuffer:
    def __init__(self, acceptance: AcceptanceModel | None) -> None:
        self._acceptance = acceptance
        self.start_over()

    def start_over(self) -> None:
        self._outcomes: list[DraftOutcome] = []
        self._num_steps = 0  # since the last update, drafted or not
        self._num_lessons = 0

    def add(self, outcome: DraftOutcome) -> None:
        self._num_steps += 1
        is_large = len(outcome.state.rows) >= _LARGE_BATCH
        is_early = self._num_lessons < 8
        if outcome.plan.drafter is not None and (is_early or not is_large or self._num_steps % _LARGE_STRIDE == 0):
            self._outcomes.append(outcome)
        if self._outcomes and (is_early or self._num_steps >= (_LARGE_STEPS if is_large else _STEPS)):
            self._teach()

    def _teach(self) -> None:
        collected, self._outcomes, self._num_steps = self._outcomes, [], 0
        self._num_lessons += 1
        if self._acceptance is not None:
            for drafter in {str(outcome.plan.drafter) for outcome in collected}:
                _teach(self._acceptance, drafter, [o for o in collected if o.plan.drafter == drafter])


def _teach(acceptance: AcceptanceModel, drafter: str, outcomes: list[DraftOutcome]) -> None:
    tested = np.flatnonzero(np.concatenate([outcome.reached for outcome in outcomes]))
    acceptance.observe(
        drafter,
        np.concatenate([outcome.state.rows[outcome.forest.sequence] for outcome in outcomes])[tested],
        np.concatenate([outcome.forest.depth for outcome in outcomes])[tested],
        np.concatenate([outcome.forest.rank for outcome in outcomes])[tested],
        np.concatenate([outcome.forest.gap for outcome in outcomes])[tested],
        np.concatenate([outcome.accepted for outcome in outcomes])[tested],
    )
