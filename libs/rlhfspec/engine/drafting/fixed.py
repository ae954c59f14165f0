"""Static strategies, for comparison with the adaptive one.

>>> static_grid(("model",))["model-d6-w2-b3"].depth
6
"""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter

from rlhfspec.common.arrays import FloatArray
from rlhfspec.engine.drafting.acceptance import AcceptanceModel
from rlhfspec.engine.drafting.base import PLAIN, BatchState, DraftChoice, DraftOutcome, DraftPlan, Forest, LevelRule
from rlhfspec.engine.drafting.budget import best_nodes
from rlhfspec.engine.drafting.cost import TARGET, CostModel, host_kind
from rlhfspec.engine.drafting.journal import Explanation, Journal
from rlhfspec.engine.drafting.outcomes import OutcomeBuffer
from rlhfspec.job.choices.drafters import DRAFTERS


class Always:
    def go_on(self, *, frontier_acceptance: FloatArray, num_rows: int, level: int) -> bool:
        return True


def static_grid(drafters: Iterable[str]) -> dict[str, DraftPlan]:
    grid: dict[str, DraftPlan] = {}
    for name in drafters:
        for shape in DRAFTERS[name].fixed:
            plan = DraftPlan(drafter=name, **shape._asdict())
            grid[f"{name}-d{plan.depth}" if shape[1:] == (1, 1, None) else plan.name] = plan
    return grid


class FixedSelector:
    """Selector of one fixed plan. `plan.max_nodes` per sequence is pooled: the best nodes of the whole batch."""

    def __init__(
        self, plan: DraftPlan, *, costs: CostModel | None = None, acceptance: AcceptanceModel | None = None
    ) -> None:
        self._plan = plan
        self._costs = costs
        self._acceptance = acceptance
        self._outcomes = OutcomeBuffer(acceptance)
        self._journal = Journal(costs)

    def plan(self, state: BatchState) -> DraftPlan:
        return self._plan if len(state.rows) and state.most_nodes != 0 else PLAIN

    def rule(self, plan: DraftPlan, state: BatchState) -> LevelRule:
        return Always()

    def budget(self, plan: DraftPlan, state: BatchState, forest: Forest, draft_seconds: float) -> DraftChoice:
        limit = forest.size if plan.max_nodes is None else plan.max_nodes * len(state.rows)
        keep = best_nodes(forest.path_acceptance, limit if state.most_nodes is None else min(limit, state.most_nodes))
        rows, verify_seconds = len(state.rows) + state.num_prefill_rows + len(keep), 0.0
        if self._costs is not None:
            verify_seconds = self._costs.table(TARGET).seconds(rows, state.kv_tokens)
        accepted = float(forest.path_acceptance[keep].sum())
        return DraftChoice(keep=keep, predicted_accepted=accepted, predicted_verify_seconds=verify_seconds)

    def observe(self, outcome: DraftOutcome) -> None:
        started, predicted, state = perf_counter(), outcome.draft_seconds, outcome.state
        rows = len(state.rows) + state.num_prefill_rows + outcome.forest.size
        if self._costs is not None and rows:
            rest = max(outcome.step_seconds - outcome.draft_seconds - outcome.verify_seconds, 1e-6)
            predicted += self._costs.observe(TARGET, rows, outcome.verify_seconds, state.kv_tokens)
            predicted += self._costs.observe(host_kind(outcome.plan.drafter), len(state.rows), rest)
        self._outcomes.add(outcome)
        self._journal.close(outcome, is_trial=False, predicted_seconds=predicted, started=started)

    def reset(self) -> None:
        self._outcomes.start_over()
        if self._acceptance is not None:
            self._acceptance.reset()

    def start_totals(self) -> None:
        self._journal.start_totals()

    def explain(self) -> Explanation:
        return self._journal.explain(rates={})
