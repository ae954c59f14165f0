"""Expected tokens per second of every plan: predicted accepted tokens of its last drafts, over predicted costs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rlhfspec.common.arrays import Floats
from rlhfspec.engine.drafting.base import PLAIN, BatchState, DraftPlan, Forest
from rlhfspec.engine.drafting.budget import descending
from rlhfspec.engine.drafting.cost import TARGET, CostModel, draft_kind
from rlhfspec.job.choices.drafters import DRAFTERS

_NODES = np.array([0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0])  # per sequence
_DRAFT_DEPTHS = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24])
_CURVE_MEMORY = 8.0  # sequences' trees that a curve remembers
_TRUTH_MEMORY = 200.0  # promised tokens that the correction remembers
_TRUTH_KEPT = 0.98  # share of the memory kept per step
_TRIAL_SHARE = 0.002  # of time for trials of one plan that is not in use
_MUCH_SMALLER = 0.7
_EARLY_USES, _LEARN_EVERY = 8, 4  # uses of a plan
_BUSHES_UP_TO = 2  # sequences: wide trees need almost free rows in the verification
_SHORTEST_WAIT = 8  # steps between such trials


def default_plans(drafters: Iterable[str]) -> tuple[DraftPlan, ...]:
    """Return few, deep plans, since a level rule and a node budget shorten them."""
    return PLAIN, *(DraftPlan(drafter=name, **shape._asdict()) for name in drafters for shape in DRAFTERS[name].shapes)


class _Prospect:
    def __init__(self, plan: DraftPlan) -> None:
        self.plan = plan
        # [depths, nodes] accepted tokens per sequence with drafts of at most that depth; initially of an average
        # drafter
        self.gain: Floats = 3.0 * (1.0 - 0.75 ** np.minimum(_NODES, _DRAFT_DEPTHS[:, None]))
        self.success = 0.75  # accepted children per expanded node
        depths = [*(int(depth) for depth in _DRAFT_DEPTHS if depth < plan.depth), plan.depth]
        self.notches = [replace(plan, depth=depth) for depth in depths]
        self.promised = self.came_true = 1.0  # tokens, decayed sums
        self.promise = 0.0  # tokens per second at the last look, before correction
        self.batch = 0.0  # sequences at which the curves were learnt
        self.num_learnt = self.num_used = self.last_used = 0
        self.pause = 1  # steps between the last two uses

    def learn(self, forest: Forest, num_sequences: int) -> None:
        self.num_learnt += 1
        rate = max(num_sequences / (num_sequences + _CURVE_MEMORY), 1.0 / self.num_learnt)
        self.batch += rate * (num_sequences - self.batch)
        path = forest.path_acceptance
        above = num_sequences + float(path[forest.parent[forest.depth > 1]].sum()) / self.plan.branch
        self.success += rate * (float(path.sum()) / above - self.success)
        deepest = int(forest.depth.max(initial=0))
        gain = np.zeros(len(_NODES))
        for i, depth in enumerate(_DRAFT_DEPTHS.tolist()):
            if i == 0 or _DRAFT_DEPTHS[i - 1] < deepest:  # otherwise nothing is deeper
                sums = np.append(0.0, descending(path[forest.depth <= depth]).cumsum())
                gain = np.interp(_NODES * num_sequences, np.arange(len(sums)), sums) / num_sequences
            self.gain[i] += rate * (gain - self.gain[i])


class DraftOutlook:
    def __init__(self, costs: CostModel, plans: Iterable[DraftPlan]) -> None:
        self._costs = costs
        self._prospects = [_Prospect(plan) for plan in plans if plan.drafter is not None]
        self._of = {plan: prospect for prospect in self._prospects for plan in prospect.notches}
        self.forget()
        self.rates: dict[DraftPlan, float] = {}
        self.best, self.best_rate = PLAIN, 0.0

    def forget(self) -> None:
        for prospect in self._prospects:
            prospect.num_learnt = prospect.num_used = 0
            prospect.promised = prospect.came_true = _TRUTH_MEMORY / 4

    def look(self, state: BatchState) -> None:
        costs, num_sequences = self._costs, len(state.rows)
        rows = num_sequences + state.num_prefill_rows
        verify = costs.table(TARGET).seconds_array(rows + _NODES * num_sequences, state.kv_tokens)
        verify -= costs.owed_seconds(state.num_prefill_rows)
        plain = costs.plain_seconds(num_sequences, state.num_prefill_rows, state.kv_tokens)
        self.rates = {PLAIN: num_sequences / plain}
        for prospect in self._prospects:
            plan, name = prospect.plan, str(prospect.plan.drafter)
            if plan.width > 1 and num_sequences > _BUSHES_UP_TO:
                continue
            seconds = costs.table(draft_kind(name, first=True)).seconds(num_sequences)
            seconds += costs.host_seconds(name, num_sequences)
            table = costs.tables.get(draft_kind(name))  # None: it drafts in one go
            level = table.seconds(plan.width * num_sequences) if table is not None else 0.0
            draft = seconds + (_DRAFT_DEPTHS[:, None] - 1) * level
            rates = num_sequences * ((1.0 + prospect.gain) / (verify + draft)).max(axis=1)  # by depth
            # One notch deeper than the best, since the level rule stops where it does not pay. Unlimited if the curves
            # were learnt at a larger batch, which was not worth drafting for as deeply.
            deepest = int(rates.argmax()) + 1 if num_sequences > _MUCH_SMALLER * prospect.batch else len(_DRAFT_DEPTHS)
            now = prospect.notches[min(deepest, len(prospect.notches) - 1)]
            prospect.promise = float(rates.max())
            rate = prospect.promise * prospect.came_true / prospect.promised
            # the cost of catching up, spread over all tokens these sequences may still generate
            if DRAFTERS[name].runs_draft_model:
                owed = costs.catch_up_seconds(name, num_sequences, int(state.unseen.sum()))
                left = max(int(state.room.sum()), num_sequences)
                rate = left / (left / rate + owed)
            self.rates[now] = rate
        self.best = max(self.rates, key=self.rates.__getitem__)
        self.best_rate = self.rates[self.best]

    def trial(self, step: int) -> DraftPlan | None:
        """Return a plan other than the best that is due for a trial, or None. Slower plans are tried less."""
        for plan, rate in self.rates.items():
            if plan in (PLAIN, self.best):
                continue
            prospect = self._of[plan]
            wait = max((1.0 - rate / self.best_rate) / _TRIAL_SHARE, _SHORTEST_WAIT)
            if step - prospect.last_used >= min(wait, _SHORTEST_WAIT * prospect.num_used):
                return plan
        return None

    def use(self, plan: DraftPlan, step: int) -> None:
        if plan.drafter is not None:
            prospect = self._of[plan]
            prospect.pause, prospect.last_used = step - prospect.last_used, step
            prospect.num_used += 1

    def success(self, plan: DraftPlan) -> float:
        return self._of[plan].success

    def learn_forest(self, plan: DraftPlan, forest: Forest, num_sequences: int) -> None:
        """Learn a plan's expected tokens from a draft; after some uses only from one in four, to save time."""
        prospect = self._of.get(plan)
        if prospect is not None and (prospect.num_used <= _EARLY_USES or prospect.num_used % _LEARN_EVERY == 0):
            prospect.learn(forest, num_sequences)

    def promised(self, plan: DraftPlan, seconds: float) -> float:
        return seconds * self._of[plan].promise if plan in self._of else 0.0

    def learn_truth(self, plan: DraftPlan, num_tokens: int, promised: float) -> None:
        if plan in self._of:
            prospect = self._of[plan]
            kept = max(_TRUTH_MEMORY / (_TRUTH_MEMORY + promised), 0.95) * _TRUTH_KEPT**prospect.pause
            prospect.promised = kept * prospect.promised + promised
            prospect.came_true = kept * prospect.came_true + num_tokens

    def ranked(self) -> dict[str, float]:
        return {plan.name: rate for plan, rate in sorted(self.rates.items(), key=lambda item: -item[1])}
