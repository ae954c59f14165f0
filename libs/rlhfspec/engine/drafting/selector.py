"""Adaptive choice of the drafting strategy by expected tokens per expected second (docs/generation.md)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter

import numpy as np

from rlhfspec.engine.drafting.acceptance import AcceptanceModel
from rlhfspec.engine.drafting.base import PLAIN, BatchState, DraftChoice, DraftOutcome, DraftPlan, Forest, LevelRule
from rlhfspec.engine.drafting.budget import best_nodes, budgets, descending, worth_by_room
from rlhfspec.engine.drafting.cost import TARGET, CostModel, draft_kind, host_kind
from rlhfspec.engine.drafting.journal import Explanation, Journal
from rlhfspec.engine.drafting.levels import LevelTerms, PayingLevel
from rlhfspec.engine.drafting.outcomes import OutcomeBuffer
from rlhfspec.engine.drafting.outlook import DraftOutlook
from rlhfspec.job.choices.drafters import DRAFTERS

_REPLAN_EVERY = 4  # steps between two looks at all plans; a new batch size triggers a look
_LEAST_TRIED = 4  # sequences a trial drafts for, and nodes it verifies, at least
_TRIAL_DIVISOR = 8  # a trial drafts for 1/8 of the batch, because an idle drafter must catch up with all prompts
_SURPRISE_TOKENS, _SURPRISE_TIMES = 2, 3  # surprise: more than 3 times the expected accepted tokens, plus 2
_ENDING = 8  # tokens of room


class AdaptiveSelector:
    def __init__(self, costs: CostModel, acceptance: AcceptanceModel, plans: Iterable[DraftPlan]) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._outlook = DraftOutlook(costs, plans)
        self._outcomes = OutcomeBuffer(acceptance)
        self._journal = Journal(costs)
        self._step = 0
        self._looked_at: tuple[int, bool] | None = None  # the batch at the last look: sequences, has prompts
        self._is_trial = False
        self._rule: PayingLevel | None = None

    def plan(self, state: BatchState) -> DraftPlan:
        started = perf_counter()
        chosen = self._choose(state)
        self._journal.spend(started)
        return chosen

    def rule(self, plan: DraftPlan, state: BatchState) -> LevelRule:
        assert plan.drafter is not None, "nothing is drafted"
        started = perf_counter()
        terms = LevelTerms(
            self._costs.table(TARGET),
            self._costs.table(draft_kind(plan.drafter), keep=False),
            # in a trial on part of the batch, a level costs more per sequence: the plan alone sets its depth
            tokens_per_second=self._outlook.best_rate if plan.num_sequences is None else 0.0,
            success=self._outlook.success(plan),
            verified_rows=2 * len(state.rows) + state.num_prefill_rows,
        )
        self._rule = PayingLevel(terms)
        self._journal.spend(started)
        return self._rule

    def budget(self, plan: DraftPlan, state: BatchState, forest: Forest, draft_seconds: float) -> DraftChoice:
        """Keep the best N nodes, with S(N) expected accepted tokens, where N maximizes tokens per second.

        (B + S(N)) / (draft + host + target(B + prefill + N) - target(prefill))
        """
        started = perf_counter()
        num_sequences = len(state.rows)
        rows = num_sequences + state.num_prefill_rows
        most = forest.size if state.most_nodes is None else min(forest.size, state.most_nodes)
        looked_at = budgets(most if plan.max_nodes is None else min(most, plan.max_nodes * num_sequences))
        worth = worth_by_room(forest, state.room)
        ranked = descending(worth)
        expected = np.append(0.0, ranked.cumsum())[looked_at]  # S(N)
        verify_seconds = self._costs.table(TARGET).seconds_array(looked_at + rows, state.kv_tokens)
        fixed = draft_seconds + self._costs.host_seconds(plan.drafter, num_sequences)
        fixed -= self._costs.owed_seconds(state.num_prefill_rows)
        best = int(((num_sequences + expected) / (fixed + verify_seconds)).argmax())
        num_nodes = int(looked_at[best])
        if self._is_trial:
            num_nodes = max(num_nodes, min(most, max(num_sequences // _TRIAL_DIVISOR, _LEAST_TRIED)))
        if _is_telling(state):
            self._outlook.learn_forest(plan, forest, plan.num_sequences or num_sequences)
        keep = best_nodes(worth, num_nodes, ranked)
        choice = DraftChoice(
            keep=keep,
            predicted_accepted=float(forest.path_acceptance[keep].sum()),
            predicted_verify_seconds=float(verify_seconds[best]),
        )
        self._journal.spend(started)
        return choice

    def observe(self, outcome: DraftOutcome) -> None:
        started = perf_counter()
        predicted_seconds = self._learn(outcome) if len(outcome.state.rows) else 0.0
        self._rule = None
        self._journal.close(outcome, is_trial=self._is_trial, predicted_seconds=predicted_seconds, started=started)

    def reset(self) -> None:
        self._acceptance.reset()
        self._outcomes.start_over()
        self._outlook.forget()
        self._looked_at = None

    def start_totals(self) -> None:
        self._journal.start_totals()

    def explain(self) -> Explanation:
        return self._journal.explain(self._outlook.ranked())

    def _choose(self, state: BatchState) -> DraftPlan:
        self._is_trial = False
        if (state.room < 2).all() or state.most_nodes == 0:  # nothing can be drafted
            return PLAIN
        self._step += 1
        batch = len(state.rows), state.num_prefill_rows > 0
        if batch != self._looked_at or self._step % _REPLAN_EVERY == 0:
            self._outlook.look(state)
            self._looked_at = batch
        trial = self._outlook.trial(self._step)
        self._is_trial = trial is not None
        chosen = trial or self._outlook.best
        self._outlook.use(chosen, self._step)
        part = max(len(state.rows) // _TRIAL_DIVISOR, _LEAST_TRIED)
        return replace(chosen, num_sequences=part) if self._is_trial and part < len(state.rows) else chosen

    def _learn(self, outcome: DraftOutcome) -> float:
        costs, state, drafter = self._costs, outcome.state, outcome.plan.drafter
        num_sequences = len(state.rows)
        rows = num_sequences + state.num_prefill_rows + outcome.forest.size
        rest = max(outcome.step_seconds - outcome.draft_seconds - outcome.verify_seconds, 1e-6)
        predicted = costs.observe(TARGET, rows, outcome.verify_seconds, state.kv_tokens)
        predicted += costs.observe(host_kind(drafter), num_sequences, rest)
        self._outcomes.add(outcome)
        if drafter is None:
            return predicted
        level_rows = self._rule.level_rows if self._rule is not None else []
        part = outcome.plan.num_sequences
        num_drafted = part or num_sequences
        num_unseen = int(state.unseen[:part].sum()) if DRAFTERS[drafter].runs_draft_model else 0
        predicted += costs.observe_draft(drafter, num_drafted + num_unseen, level_rows, outcome.draft_seconds)
        assert outcome.choice is not None, "whatever is drafted has a budget"
        num_accepted, believed = int(np.count_nonzero(outcome.accepted)), outcome.choice.predicted_accepted
        if _is_telling(state) and not state.num_prefill_rows and outcome.forest.size != state.most_nodes:
            if part is None:
                steady = predicted - costs.catch_up_seconds(drafter, num_drafted, num_unseen)
                given, promised = outcome.num_committed, self._outlook.promised(outcome.plan, steady)
            else:
                given, promised = part + num_accepted, part + believed
            self._outlook.learn_truth(outcome.plan, given, promised)
        if num_accepted > _SURPRISE_TOKENS + _SURPRISE_TIMES * believed:
            self.reset()  # what was learnt is out of date
        return predicted


def _is_telling(state: BatchState) -> bool:
    """Return whether a step can be learnt from: not if most sequences are about to end."""
    return bool(2 * np.count_nonzero(state.room > _ENDING) > len(state.rows))
