"""Choosing the strategy anew at every step (DESIGN: before drafting, between levels, after drafting).

Everything is one question: expected tokens over expected seconds. Tokens come from calibrated acceptance, seconds
from measured tables; both are corrected by every step. Not drafting is a legal choice.

Example:
    >>> costs = CostModel.profile(lambda kind, rows, kv: 0.01 if kind == "target" else 0.001, drafters=("model",))
    >>> selector = AdaptiveSelector(costs, AcceptanceModel(num_rows=4), default_plans(("model",), max_batch=4))
    >>> state = BatchState(rows=np.arange(4), room=np.full(4, 99), num_prefill_rows=0, kv_tokens=400)
    >>> selector.plan(state).drafter  # verifying more rows costs nothing here
    'model'
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from rlhfspec.drafting.acceptance import AcceptanceModel
from rlhfspec.drafting.base import (
    PLAIN,
    BatchState,
    Choice,
    FloatArray,
    Forest,
    IntArray,
    LevelRule,
    Outcome,
    Plan,
)
from rlhfspec.drafting.cost import TARGET, CostModel, draft_kind, host_kind
from rlhfspec.drafting.decisions import Decision, Explanation, Option
from rlhfspec.drafting.outlook import Outlook
from rlhfspec.drafting.plans import default_plans, static_grid
from rlhfspec.drafting.watchdog import Watchdog, WatchdogEvent

__all__ = ["AdaptiveConfig", "AdaptiveSelector", "FixedSelector", "default_plans", "optimum", "static_grid"]

_NO_NODES = np.empty(0, np.int32)
_NUM_DECISIONS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveConfig:
    """hysteresis: a new plan must promise this much more. budget_hysteresis: likewise a new number of nodes.
    probe_every: steps between trials of what has not been used lately. evaluate_every: steps between two looks at all
    plans (a new batch size is looked at in any case). buckets: numbers of rows that the engine runs well (captured
    graphs), None = any. max_rows: most rows of one forward.
    """

    hysteresis: float = 0.03
    budget_hysteresis: float = 0.005
    probe_every: int = 24
    evaluate_every: int = 4
    buckets: tuple[int, ...] | None = None
    max_rows: int = 1 << 20


class _Journal:
    """Decisions, times and errors: what every selector writes down."""

    def __init__(self, costs: CostModel | None) -> None:
        self.costs = costs
        self.decisions: deque[Decision] = deque(maxlen=_NUM_DECISIONS)
        self.num_steps = 0
        self.selector_seconds = 0.0  # of the current step
        self.total_selector_seconds = 0.0
        self.total_seconds = 0.0
        self.optimum_seconds = 0.0  # what the optimum would have needed for the same tokens

    def close(
        self, outcome: Outcome, *, is_probe: bool, predicted_draft_seconds: float, predicted_host_seconds: float
    ) -> None:
        choice = outcome.choice
        predicted_verify = choice.predicted_verify_seconds if choice else 0.0
        predicted = predicted_draft_seconds + predicted_verify + predicted_host_seconds
        if self.costs is not None and choice is not None:
            self.costs.record_error("step", predicted, outcome.step_seconds)
        self.decisions.append(
            Decision(
                step=self.num_steps,
                plan=outcome.plan.name,
                is_probe=is_probe,
                runner_up=choice.runner_up if choice else "",
                num_sequences=len(outcome.state.rows),
                num_prefill_rows=outcome.state.num_prefill_rows,
                num_proposed=outcome.num_proposed,
                num_verified=outcome.forest.size,
                predicted_accepted=choice.predicted_accepted if choice else 0.0,
                accepted=int(np.count_nonzero(outcome.accepted)),
                predicted_draft_seconds=predicted_draft_seconds,
                draft_seconds=outcome.draft_seconds,
                predicted_verify_seconds=predicted_verify,
                verify_seconds=outcome.verify_seconds,
                predicted_seconds=predicted,
                seconds=outcome.step_seconds,
                selector_seconds=self.selector_seconds,
            )
        )
        self.num_steps += 1
        self.total_seconds += outcome.step_seconds

    def spend(self, started: float, *, ends_step: bool = False) -> None:
        seconds = perf_counter() - started
        self.selector_seconds += seconds
        self.total_selector_seconds += seconds
        if ends_step:
            self.selector_seconds = 0.0

    def explain(self, options: tuple[Option, ...], events: Iterable[WatchdogEvent]) -> Explanation:
        costs = self.costs
        return Explanation(
            decisions=tuple(self.decisions),
            options=options,
            mape={kind: costs.mape(kind) for kind in costs.error_kinds()} if costs is not None else {},
            share_of_step=self.total_selector_seconds / self.total_seconds if self.total_seconds else 0.0,
            realised_of_optimum=self.optimum_seconds / self.total_seconds if self.optimum_seconds else math.nan,
            events=tuple(events),
        )


class _Always:
    """The level rule of a static plan."""

    def go_on(self, *, frontier_acceptance: FloatArray, num_rows: int, level: int) -> bool:
        return True


class FixedSelector:
    """A static strategy: always the same plan, every node of it.

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
        self._journal = _Journal(costs)

    def plan(self, state: BatchState) -> Plan:
        return self._plan if len(state.rows) else PLAIN

    def rule(self, plan: Plan, state: BatchState) -> LevelRule:
        return _Always()

    def budget(self, plan: Plan, state: BatchState, forest: Forest, draft_seconds: float) -> Choice:
        started = perf_counter()
        num_sequences = len(state.rows)
        if plan.max_nodes is None or forest.size == 0:
            keep = np.arange(forest.size, dtype=np.int32)
        elif self._per_row:
            keep = _best_of_each(forest, plan.max_nodes)
        else:
            keep = best_nodes(forest.path_acceptance, min(plan.max_nodes * num_sequences, forest.size))
        verify_seconds = 0.0
        if self._costs is not None:
            rows = num_sequences + state.num_prefill_rows + len(keep)
            kv_tokens = state.kv_tokens * (1.0 + len(keep) / max(num_sequences, 1))
            verify_seconds = float(self._costs.target_seconds(rows, kv_tokens))
        choice = Choice(
            keep=keep,
            predicted_accepted=float(forest.path_acceptance[keep].sum()),
            predicted_verify_seconds=verify_seconds,
        )
        self._journal.spend(started)
        return choice

    def observe(self, outcome: Outcome) -> None:
        started = perf_counter()
        host_seconds = _observe_costs(self._costs, outcome)
        _observe_acceptance(self._acceptance, outcome)
        self._journal.close(
            outcome,
            is_probe=False,
            predicted_draft_seconds=outcome.draft_seconds,
            predicted_host_seconds=host_seconds,
        )
        self._journal.spend(started, ends_step=True)

    def reset(self) -> None:
        """Weights changed."""
        if self._acceptance is not None:
            self._acceptance.reset()

    def explain(self) -> Explanation:
        return self._journal.explain((), ())


class _PayingLevel:
    """One more level only if the tokens it should bring pay for its draft and its rows at the current speed."""

    __slots__ = ("_clock", "_last", "_level_table", "_rate", "_rows", "_success", "_target", "levels", "started")

    def __init__(
        self,
        costs: CostModel,
        plan: Plan,
        *,
        rows: int,
        tokens_per_second: float,
        success: float,
        clock: Callable[[], float],
    ) -> None:
        assert plan.drafter is not None
        self._target = costs.table(TARGET)
        self._level_table = costs.table(draft_kind(plan.drafter)) if plan.depth > 1 else None
        self._rate = tokens_per_second
        self._success = success  # expected accepted children of an expanded node
        self._rows = rows  # that the verification would have without the next level
        self._clock = clock
        self.levels: list[tuple[int, float]] = []  # (rows, seconds) of the levels drafted so far; rows 0: the first
        self.started = self._last = clock()

    def go_on(self, *, frontier_acceptance: FloatArray, num_rows: int, level: int) -> bool:
        now = self._clock()
        self.levels[-1:] = [(self.levels[-1][0], now - self._last)] if self.levels else [(0, now - self._last)]
        assert self._level_table is not None
        more_verify = self._target.seconds(self._rows + num_rows) - self._target.seconds(self._rows)
        price = self._rate * more_verify / num_rows  # tokens that one more row must bring
        worth = np.maximum(frontier_acceptance * self._success - price, 0.0).sum()
        pays = bool(worth > self._rate * self._level_table.seconds(num_rows))
        if pays:
            self._rows += num_rows
            self.levels.append((num_rows, 0.0))
        self._last = self._clock()
        return pays

    def finish(self, draft_seconds: float) -> None:
        """The last level took what is left of the draft."""
        if self.levels and self.levels[-1][0] and self.levels[-1][1] == 0.0:
            self.levels[-1] = (self.levels[-1][0], max(draft_seconds - (self._last - self.started), 1e-9))


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
        self._watchdog = Watchdog()
        self._outlook = Outlook(costs, plans)
        self._journal = _Journal(costs)
        self._events: deque[WatchdogEvent] = deque(maxlen=64)
        self._step = 0
        self._current = PLAIN
        self._is_probe = False
        self._nodes_per_sequence = 0.0
        self._rule: _PayingLevel | None = None
        self._forest: Forest | None = None
        self._last_used = dict.fromkeys(self._outlook.drafters, -self._config.probe_every)
        self._evaluated: tuple[int, int] | None = None  # (batch, step) of the last look at all plans

    def plan(self, state: BatchState) -> Plan:
        started = perf_counter()
        chosen = self._choose(state) if len(state.rows) else PLAIN
        self._journal.spend(started)
        return chosen

    def rule(self, plan: Plan, state: BatchState) -> LevelRule:
        if plan.drafter is None:
            return _Always()
        started = perf_counter()
        success, _ = self._outlook.profiles[plan.drafter].next_level(plan.branch)
        self._rule = _PayingLevel(
            self._costs,
            plan,
            rows=2 * len(state.rows) + state.num_prefill_rows,
            tokens_per_second=self._outlook.best_rate,
            success=success,
            clock=self._clock,
        )
        self._journal.spend(started)
        return self._rule

    def budget(self, plan: Plan, state: BatchState, forest: Forest, draft_seconds: float) -> Choice:
        """N* = argmax_N (B + S(N)) / (draft + host + target(B + prefill + N)): one sort, no search."""
        started = perf_counter()
        self._forest = forest
        num_sequences = len(state.rows)
        rows = num_sequences + state.num_prefill_rows
        fixed = draft_seconds + self._costs.host_seconds(plan.drafter, num_sequences)
        limit = min(forest.size, max(self._config.max_rows - rows, 0))
        if plan.max_nodes is not None:
            limit = min(limit, plan.max_nodes * num_sequences)
        expected = np.zeros(limit + 1)
        expected[1:] = np.cumsum(np.sort(forest.path_acceptance)[::-1][:limit])
        counts = _candidates(limit, rows, self._config.buckets)
        kv_per_sequence = state.kv_tokens / max(num_sequences, 1)
        seconds = self._costs.target_seconds(rows + counts, state.kv_tokens + kv_per_sequence * counts)
        speed = (num_sequences + expected[counts]) / (seconds + fixed)
        best = int(speed.argmax())
        usual = int(np.searchsorted(counts, round(self._nodes_per_sequence * num_sequences)))
        usual = min(usual, len(counts) - 1)
        if speed[usual] >= speed[best] * (1.0 - self._config.budget_hysteresis):
            best = usual
        num_nodes = int(counts[best])
        self._nodes_per_sequence = num_nodes / max(num_sequences, 1)
        choice = Choice(
            keep=best_nodes(forest.path_acceptance, num_nodes),
            predicted_accepted=float(expected[num_nodes]),
            predicted_verify_seconds=float(seconds[best]),
            runner_up=self._outlook.runner_up,
        )
        self._journal.spend(started)
        return choice

    def observe(self, outcome: Outcome) -> None:
        started = perf_counter()
        drafter, num_sequences = outcome.plan.drafter, len(outcome.state.rows)
        if num_sequences and self._outlook.best_possible_rate:
            self._journal.optimum_seconds += outcome.num_committed / self._outlook.best_possible_rate
        predicted_draft = self._observe_draft(outcome)
        predicted_host = _observe_costs(self._costs, outcome)
        _observe_acceptance(self._acceptance, outcome)
        if drafter is not None and num_sequences:
            self._learn_profile(outcome)
            self._watch(drafter, outcome, predicted_draft + predicted_host)
        self._rule, self._forest = None, None
        self._journal.close(
            outcome,
            is_probe=self._is_probe,
            predicted_draft_seconds=predicted_draft,
            predicted_host_seconds=predicted_host,
        )
        self._journal.spend(started, ends_step=True)

    def reset(self) -> None:
        """Weights changed: old acceptance counts little, and every drafter gets a new chance."""
        self._acceptance.reset()
        self._outlook.forget()
        self._watchdog.reset()
        self._evaluated = None
        self._last_used = dict.fromkeys(self._last_used, self._step - self._config.probe_every)

    def explain(self) -> Explanation:
        return self._journal.explain(self._outlook.options(), self._events)

    def _choose(self, state: BatchState) -> Plan:
        self._step += 1
        num_sequences = len(state.rows)
        allowed = tuple(
            name for name in self._outlook.drafters if self._watchdog.allows(name, self._step, num_sequences)
        )
        seen = self._evaluated
        if seen is None or seen[0] != num_sequences or self._step - seen[1] >= self._config.evaluate_every:
            self._outlook.evaluate(num_sequences, state.num_prefill_rows, state.kv_tokens, allowed)
            self._evaluated = (num_sequences, self._step)
            if not self._outlook.is_within(self._current, self._config.hysteresis):
                self._current = self._outlook.best
        chosen = self._probe(allowed)
        self._is_probe = chosen is not None
        chosen = chosen or self._current
        if chosen.drafter is not None:
            self._last_used[chosen.drafter] = self._step
        return chosen

    def _probe(self, allowed: tuple[str, ...]) -> Plan | None:
        """The most promising plan of a drafter whose statistics have grown old, once in a while."""
        for name in allowed:
            if self._step - self._last_used[name] >= self._config.probe_every and name != self._current.drafter:
                return self._outlook.best_of(name)
        return None

    def _observe_draft(self, outcome: Outcome) -> float:
        """Teach the draft tables; returns what had been predicted for the levels that were run."""
        name = outcome.plan.drafter
        if name is None or not len(outcome.state.rows):
            return 0.0
        first_table = self._costs.table(draft_kind(name, first=True))
        first_seconds, predicted = outcome.draft_seconds, first_table.seconds(len(outcome.state.rows))
        if self._rule is not None and self._rule.levels:
            self._rule.finish(outcome.draft_seconds)
            (_, first_seconds), *deeper = self._rule.levels
            for rows, seconds in deeper:
                predicted += self._costs.table(draft_kind(name)).seconds(rows)
                self._costs.observe(draft_kind(name), rows, seconds)
        self._costs.observe(draft_kind(name, first=True), len(outcome.state.rows), first_seconds)
        self._costs.record_error(f"draft-total:{name}", predicted, outcome.draft_seconds)
        return predicted

    def _learn_profile(self, outcome: Outcome) -> None:
        if self._forest is None or outcome.choice is None:
            return
        self._outlook.learn(
            outcome.plan,
            self._forest,
            num_sequences=len(outcome.state.rows),
            predicted=outcome.choice.predicted_accepted,
            num_nodes=len(outcome.choice.keep),
            accepted=int(np.count_nonzero(outcome.accepted)),
        )

    def _watch(self, drafter: str, outcome: Outcome, predicted_rest: float) -> None:
        state = outcome.state
        num_sequences = len(state.rows)
        plain = self._outlook.plain_seconds(num_sequences, state.num_prefill_rows, state.kv_tokens)
        predicted = predicted_rest + (outcome.choice.predicted_verify_seconds if outcome.choice else plain)
        event = self._watchdog.observe(
            drafter,
            self._step,
            num_sequences,
            num_tokens=outcome.num_committed,
            seconds=min(outcome.step_seconds, 3.0 * predicted),  # somebody else's noise is not the drafter's fault
            plain_seconds=plain,
        )
        if event is not None:
            self._events.append(event)
            self._evaluated = None


def optimum(selector: AdaptiveSelector, num_sequences: int, *, num_prefill_rows: int = 0, kv_tokens: int = 0) -> float:
    """The best expected tokens/s at this batch over all plans and all N, by the measured tables and acceptance."""
    return selector._outlook.optimum(num_sequences, num_prefill_rows, kv_tokens)


def best_nodes(path_acceptance: FloatArray, num_nodes: int) -> IntArray:
    """Ascending indices of the best `num_nodes`; of equals the first, so that parents come before their children.

    >>> best_nodes(np.array([0.9, 0.5, 0.5, 0.8], np.float32), 3).tolist()
    [0, 1, 3]
    """
    size = len(path_acceptance)
    if num_nodes >= size:
        return np.arange(size, dtype=np.int32)
    if num_nodes == 0:
        return _NO_NODES
    threshold = np.partition(path_acceptance, size - num_nodes)[size - num_nodes]
    keep = np.flatnonzero(path_acceptance >= threshold)
    if len(keep) > num_nodes:  # ties at the threshold
        keep = np.sort(np.argsort(-path_acceptance, kind="stable")[:num_nodes])
    return keep.astype(np.int32)


def _best_of_each(forest: Forest, num_nodes: int) -> IntArray:
    """The best `num_nodes` of every sequence."""
    order = np.lexsort((-forest.path_acceptance, forest.sequence))  # stable
    sequence = forest.sequence[order]
    place = np.arange(forest.size) - np.searchsorted(sequence, sequence)
    return np.sort(order[place < num_nodes]).astype(np.int32)


def _candidates(limit: int, rows: int, buckets: tuple[int, ...] | None) -> IntArray:
    """Budgets to look at: every one, or those that fill a bucket of total rows, and none."""
    if buckets is None:
        return np.arange(limit + 1, dtype=np.int32)
    filling = {min(bucket - rows, limit) for bucket in buckets if bucket > rows}
    return np.array(sorted({0, *filling}), dtype=np.int32)


def _observe_costs(costs: CostModel | None, outcome: Outcome) -> float:
    """Teach target and host tables; returns what had been predicted for the host."""
    state, num_sequences = outcome.state, len(outcome.state.rows)
    rows = num_sequences + state.num_prefill_rows + outcome.forest.size
    if costs is None or rows == 0:
        return 0.0
    kv_tokens = state.kv_tokens * (1.0 + outcome.forest.size / max(num_sequences, 1))
    costs.observe(TARGET, rows, outcome.verify_seconds, kv_tokens)
    rest = max(outcome.step_seconds - outcome.draft_seconds - outcome.verify_seconds, 1e-6)
    kind = host_kind(outcome.plan.drafter)
    predicted = costs.table(kind).seconds(num_sequences)
    costs.observe(kind, num_sequences, rest)
    return predicted


def _observe_acceptance(acceptance: AcceptanceModel | None, outcome: Outcome) -> None:
    if acceptance is None or outcome.plan.drafter is None or not outcome.forest.size:
        return
    forest, tested = outcome.forest, np.flatnonzero(outcome.reached)
    acceptance.observe(
        outcome.plan.drafter,
        outcome.state.rows[forest.sequence[tested]],
        forest.depth[tested],
        forest.rank[tested],
        forest.gap[tested],
        outcome.accepted[tested],
    )
