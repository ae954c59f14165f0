"""Choosing the strategy anew at every step: before drafting, between levels, after drafting.

Everything is one question: expected tokens over expected seconds. Tokens come from calibrated acceptance, seconds
from measured tables; both are corrected by every step. Not drafting is a legal choice. docs/selector.md tells the
whole story.

Example:
    >>> costs = CostModel.profile(lambda kind, rows, kv: 0.01 if kind == "target" else 0.001, drafters=("model",))
    >>> selector = AdaptiveSelector(costs, AcceptanceModel(num_rows=4), default_plans(("model",), max_batch=4))
    >>> state = BatchState(rows=np.arange(4), room=np.full(4, 99), num_prefill_rows=0, kv_tokens=400)
    >>> selector.plan(state).drafter  # verifying more rows costs nothing here
    'model'
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from rlhfspec.drafting.acceptance import AcceptanceModel
from rlhfspec.drafting.base import PLAIN, BatchState, Choice, Forest, LevelRule, Outcome, Plan, empty_forest
from rlhfspec.drafting.budget import best_nodes, budgets, descending, worth_by_room
from rlhfspec.drafting.cost import TARGET, CostModel, draft_kind
from rlhfspec.drafting.fixed import FixedSelector
from rlhfspec.drafting.journal import Decision, Explanation, Journal, Option
from rlhfspec.drafting.lessons import Lessons, latest_forests, observe_costs, observe_draft, predicted_draft_seconds
from rlhfspec.drafting.levels import Always, PayingLevel
from rlhfspec.drafting.outlook import Outlook
from rlhfspec.drafting.plans import default_plans, static_grid
from rlhfspec.drafting.watchdog import Watchdog, WatchdogEvent

__all__ = [
    "AdaptiveConfig",
    "AdaptiveSelector",
    "Decision",
    "Explanation",
    "FixedSelector",
    "Option",
    "default_plans",
    "optimum",
    "static_grid",
]


_THOROUGH_STEPS, _THOROUGH_EVERY = 64, 4  # all is learnt from the first steps, then from one in four
_LEAST_PROBED = 4  # nodes


_MOST_PATIENCE = 16  # times probe_every
_WORTH_RATE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveConfig:
    """hysteresis: a new plan must promise this much more. budget_hysteresis: likewise a new number of nodes.
    probe_every: steps before a drafter not in use is tried, and the first wait between trials.
    evaluate_every: steps between two looks at all plans (a new batch size, or a lesson learnt, is looked at in any
    case). buckets: numbers of rows that the engine runs well (captured graphs), None = any. max_rows: most rows of one
    forward.
    """

    hysteresis: float = 0.03
    budget_hysteresis: float = 0.005
    probe_every: int = 24
    evaluate_every: int = 16
    buckets: tuple[int, ...] | None = None
    max_rows: int = 1 << 20


class AdaptiveSelector:
    """Implements rlhfspec.drafting.base.Selector.

    `observe` also teaches `acceptance` and `costs`. `clock` times the levels of a draft (a fake one in tests).
    """

    def __init__(
        self,
        costs: CostModel,
        acceptance: AcceptanceModel,
        plans: Iterable[Plan],
        config: AdaptiveConfig | None = None,
        *,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self._costs = costs
        self._acceptance = acceptance
        self._config = config or AdaptiveConfig()
        self._clock = clock
        self._outlook = Outlook(costs, (PLAIN, *(plan for plan in plans if plan != PLAIN)))
        self._watchdog = Watchdog()
        self._lessons = Lessons(acceptance)
        self._journal = Journal(costs)
        self._events: deque[WatchdogEvent] = deque(maxlen=64)
        self._step = 0
        self._current = PLAIN
        self._is_probe = False
        self._evaluated_at: tuple[tuple[int, bool], int] | None = None  # (batch, step) of the last look at all plans
        self._last_used = dict.fromkeys(self._outlook.drafters, -self._config.probe_every)
        self._wait = dict.fromkeys(self._outlook.drafters, self._config.probe_every)  # steps before the next probe
        self._nodes_per_sequence = 0.0
        self._worth: dict[int, float] = {}  # tokens a predicted second really brought, by size of batch
        self._rule: PayingLevel | None = None
        self._proposed = empty_forest()

    def plan(self, state: BatchState) -> Plan:
        started = perf_counter()
        chosen = self._choose(state) if len(state.rows) else PLAIN
        self._journal.spend(started)
        return chosen

    def rule(self, plan: Plan, state: BatchState) -> LevelRule:
        if plan.drafter is None:
            return Always()
        started = perf_counter()
        self._rule = PayingLevel(
            self._costs.table(TARGET),
            self._costs.table(draft_kind(plan.drafter), keep=False),
            rows=2 * len(state.rows) + state.num_prefill_rows,
            tokens_per_second=self._worth.get(len(state.rows).bit_length(), self._outlook.best_rate),
            success=self._outlook.success(plan),
            clock=self._clock,
        )
        self._journal.spend(started)
        return self._rule

    def budget(self, plan: Plan, state: BatchState, forest: Forest, draft_seconds: float) -> Choice:
        """N* = argmax_N (B + S(N)) / (draft + host + target(B + prefill + N) - target(prefill))."""
        started = perf_counter()
        self._proposed = forest
        num_sequences = len(state.rows)
        rows = num_sequences + state.num_prefill_rows
        limit = min(forest.size, max(self._config.max_rows - rows, 0))
        if plan.max_nodes is not None:
            limit = min(limit, plan.max_nodes * num_sequences)
        looked_at = budgets(limit, rows, self._config.buckets)
        value = worth_by_room(forest, state.room)
        ranked = descending(value)
        expected = looked_at.sums(ranked)  # S(N)
        verify_seconds = self._costs.table(TARGET).seconds_for_more(rows, looked_at.floats, state.kv_tokens)
        fixed = draft_seconds + self._costs.host_seconds(plan.drafter, num_sequences)
        fixed -= self._outlook.owed_seconds(state.num_prefill_rows)
        speed = (expected + num_sequences) / (verify_seconds + fixed)
        best = int(speed.argmax())
        usual = min(bisect_left(looked_at.whole, round(self._nodes_per_sequence * num_sequences)), len(speed) - 1)
        if speed[usual] >= speed[best] * (1.0 - self._config.budget_hysteresis):
            best = usual
        if self._is_probe and limit:  # to learn, some nodes must be verified, whatever they promise
            best = max(best, bisect_left(looked_at.whole, min(limit, max(num_sequences // 8, _LEAST_PROBED))))
        num_nodes = looked_at.whole[best]
        if num_sequences:
            self._nodes_per_sequence = num_nodes / num_sequences
        keep = best_nodes(value, num_nodes, ranked)
        choice = Choice(
            keep=keep,
            predicted_accepted=float(forest.path_acceptance[keep].sum()),
            predicted_verify_seconds=float(verify_seconds[best]),
            runner_up=self._outlook.runner_up,
        )
        self._journal.spend(started)
        return choice

    def observe(self, outcome: Outcome) -> None:
        started = perf_counter()
        plan, num_sequences = outcome.plan, len(outcome.state.rows)
        draft_seconds = verify_seconds = host_seconds = 0.0
        if num_sequences:
            thorough = self._step < _THOROUGH_STEPS or self._step % _THOROUGH_EVERY == 0
            verify_seconds, host_seconds = observe_costs(self._costs, outcome, learn=thorough)
            self._lessons.add(outcome, self._proposed)
            if plan.drafter is not None:
                levels = self._rule.finish(outcome.draft_seconds) if self._rule is not None else []
                draft_seconds = predicted_draft_seconds(self._costs, plan.drafter, num_sequences, levels)
                if thorough:
                    observe_draft(self._costs, outcome, levels, self._step)
                    self._watch(outcome, draft_seconds + verify_seconds + host_seconds)
                if outcome.choice is not None:
                    self._learn(outcome, outcome.choice, thorough=thorough)
            if self._lessons.is_due:
                collected = self._lessons.teach()
                for name in self._outlook.drafters:
                    self._outlook.learn_profile(name, *latest_forests(collected, name))
                self._evaluated_at = None
        if num_sequences and not (outcome.state.num_prefill_rows or self._is_probe):
            self._learn_worth(num_sequences, outcome.num_committed / (draft_seconds + verify_seconds + host_seconds))
        self._rule, self._proposed = None, empty_forest()
        self._journal.close(
            outcome,
            is_probe=self._is_probe,
            predicted=(draft_seconds, verify_seconds, host_seconds),
            optimum=0.0 if outcome.state.num_prefill_rows or not num_sequences else self._outlook.best_possible_rate,
            started=started,
        )

    def reset(self) -> None:
        """Weights changed: old acceptance counts little, and every drafter gets a new chance."""
        self._acceptance.reset()
        self._lessons.start_over()
        self._outlook.forget()
        self._watchdog.reset()
        self._evaluated_at = None
        self._worth.clear()
        self._last_used = dict.fromkeys(self._last_used, self._step - self._config.probe_every)
        self._wait = dict.fromkeys(self._wait, self._config.probe_every)

    def start_totals(self) -> None:
        """What `explain` says of shares counts from here on."""
        self._journal.start_totals()

    def explain(self) -> Explanation:
        return self._journal.explain(self._outlook.options(), self._events)

    def optimum(self, num_sequences: int, *, num_prefill_rows: int = 0, kv_tokens: int = 0) -> float:
        """The best expected tokens/s at this batch over all plans and budgets, by measured tables and acceptance."""
        return self._outlook.optimum(num_sequences, num_prefill_rows, kv_tokens)

    def _choose(self, state: BatchState) -> Plan:
        self._step += 1
        num_sequences = len(state.rows)
        allows = self._watchdog.allows
        allowed = tuple(name for name in self._outlook.drafters if allows(name, self._step, num_sequences))
        seen = self._evaluated_at
        batch = (num_sequences, state.num_prefill_rows > 0)
        if seen is None or seen[0] != batch or self._step - seen[1] >= self._config.evaluate_every:
            self._outlook.evaluate(num_sequences, state.num_prefill_rows, state.kv_tokens, allowed)
            self._evaluated_at = (batch, self._step)
            if not self._outlook.is_within(self._current, self._config.hysteresis):
                self._current = self._outlook.best
        chosen = self._probe(allowed)
        self._is_probe = chosen is not None
        chosen = chosen or self._outlook.deeper[self._current]
        if chosen.drafter is not None:
            self._last_used[chosen.drafter] = self._step
            longer = min(2 * self._wait[chosen.drafter], self._config.probe_every * _MOST_PATIENCE)
            self._wait[chosen.drafter] = longer if self._is_probe else self._config.probe_every
        return chosen

    def _probe(self, allowed: tuple[str, ...]) -> Plan | None:
        """Once in a while, the most promising plan of a drafter that is not in use: its statistics have grown old.

        While another drafter pays, a probe costs most of a step's gain: each one doubles the wait for the next.
        """
        for name in allowed:
            every = self._config.probe_every
            if self._outlook.has_surprised(name):
                every = max(every // 4, 2)
            elif self._current.drafter is not None:
                every = self._wait[name]
            if name != self._current.drafter and self._step - self._last_used[name] >= every:
                return self._outlook.best_of(name)
        return None

    def _learn(self, outcome: Outcome, choice: Choice, *, thorough: bool) -> None:
        plan, num_sequences, expected = outcome.plan, len(outcome.state.rows), choice.predicted_accepted
        drafter = str(plan.drafter)
        accepted = int(np.count_nonzero(outcome.accepted))
        if self._outlook.learn_real(drafter, num_sequences=num_sequences, expected=expected, accepted=accepted):
            self._acceptance.reset(drafter)
            self._lessons.start_over()
        if thorough:
            num_nodes = len(choice.keep)
            self._outlook.learn_ratio(plan, num_sequences=num_sequences, num_nodes=num_nodes, expected=expected)

    def _learn_worth(self, num_sequences: int, rate: float) -> None:
        """What time is worth is what it has brought, not what a forecast promises: a level that is asked to beat a rate
        nobody reaches stops too early. (Dinkelbach's iteration: the achieved ratio as the price finds the best ratio.)
        """
        size = num_sequences.bit_length()
        known = self._worth.get(size, rate)
        self._worth[size] = known + _WORTH_RATE * (rate - known)

    def _watch(self, outcome: Outcome, predicted_seconds: float) -> None:
        state, num_sequences = outcome.state, len(outcome.state.rows)
        plain = self._outlook.plain_seconds(num_sequences, state.num_prefill_rows, state.kv_tokens)
        event = self._watchdog.observe(
            str(outcome.plan.drafter),
            self._step,
            num_sequences,
            num_tokens=outcome.num_committed,
            seconds=min(
                outcome.step_seconds, 3.0 * predicted_seconds
            ),  # somebody else's noise is not the drafter's fault
            plain_seconds=plain,
        )
        if event is not None:
            self._events.append(event)
            self._evaluated_at = None


def optimum(selector: AdaptiveSelector, num_sequences: int, *, num_prefill_rows: int = 0, kv_tokens: int = 0) -> float:
    """See AdaptiveSelector.optimum."""
    return selector.optimum(num_sequences, num_prefill_rows=num_prefill_rows, kv_tokens=kv_tokens)
