"""A static strategy, to compare the adaptive one with.

Example:
    >>> FixedSelector(Plan(drafter="model", depth=4)).plan(
    ...     BatchState(rows=np.arange(2), room=np.full(2, 9), num_prefill_rows=0, kv_tokens=0)
    ... ).name
    'model-d4-w1-b1'
"""

from __future__ import annotations

from time import perf_counter

import numpy as np

from rlhfspec.drafting.acceptance import AcceptanceModel
from rlhfspec.drafting.base import PLAIN, BatchState, Choice, Forest, LevelRule, Outcome, Plan, empty_forest
from rlhfspec.drafting.budget import best_nodes, best_nodes_of_each
from rlhfspec.drafting.cost import CostModel
from rlhfspec.drafting.journal import Explanation, Journal
from rlhfspec.drafting.lessons import Lessons, observe_costs
from rlhfspec.drafting.levels import Always


class FixedSelector:
    """Always the same plan, every node of it.

    With `plan.max_nodes` only so many nodes a sequence are verified: the most promising of the whole batch, or, with
    `per_row=True`, of each sequence on its own. Costs and acceptance, when given, are calibrated as they go.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        costs: CostModel | None = None,
        acceptance: AcceptanceModel | None = None,
        per_row: bool = False,
    ) -> None:
        self._plan = plan
        self._costs = costs
        self._acceptance = acceptance
        self._per_row = per_row
        self._lessons = Lessons(acceptance)
        self._journal = Journal(costs)

    def plan(self, state: BatchState) -> Plan:
        return self._plan if len(state.rows) else PLAIN

    def rule(self, plan: Plan, state: BatchState) -> LevelRule:
        return Always()

    def budget(self, plan: Plan, state: BatchState, forest: Forest, draft_seconds: float) -> Choice:
        started = perf_counter()
        num_sequences = len(state.rows)
        if plan.max_nodes is None or forest.size == 0:
            keep = np.arange(forest.size, dtype=np.int32)
        elif self._per_row:
            keep = best_nodes_of_each(forest, plan.max_nodes)
        else:
            keep = best_nodes(forest.path_acceptance, plan.max_nodes * num_sequences)
        verify_seconds = 0.0
        if self._costs is not None:
            rows = num_sequences + state.num_prefill_rows + len(keep)
            verify_seconds = float(self._costs.target_seconds(rows, state.kv_tokens))
        choice = Choice(
            keep=keep,
            predicted_accepted=float(forest.path_acceptance[keep].sum()),
            predicted_verify_seconds=verify_seconds,
        )
        self._journal.spend(started)
        return choice

    def observe(self, outcome: Outcome) -> None:
        started = perf_counter()
        verify_seconds = host_seconds = 0.0
        if self._costs is not None:
            verify_seconds, host_seconds = observe_costs(self._costs, outcome)
        self._lessons.add(outcome, empty_forest())
        if self._lessons.is_due:
            self._lessons.teach()
        predicted = outcome.draft_seconds, verify_seconds, host_seconds
        self._journal.close(outcome, is_probe=False, predicted=predicted, optimum=0.0, started=started)

    def reset(self) -> None:
        """Weights changed."""
        self._lessons.start_over()
        if self._acceptance is not None:
            self._acceptance.reset()

    def start_totals(self) -> None:
        """What `explain` says of shares counts from here on."""
        self._journal.start_totals()

    def explain(self) -> Explanation:
        return self._journal.explain((), ())
