"""How every plan looks at a batch: the forecast of its tokens over the tables' seconds, corrected by what came true."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from rlhfspec.arrays import Floats
from rlhfspec.drafting.base import PLAIN, Forest, Plan
from rlhfspec.drafting.cost import TARGET, CostModel, draft_kind
from rlhfspec.drafting.forecast import DraftProfile, Forecast
from rlhfspec.drafting.journal import Option

_MOST_LESSONS_PER_FORECAST = 6  # between two forecasts of a drafter; fewer while it is new
_RATIO_RATE = 0.1  # of a plan's forecast correction, per step that used it
_RATIO_FADE = 0.98  # per lesson: corrections of plans not used return to the drafter's mean
_REAL_MEMORY = 400.0  # expected accepted tokens that the realised ratio of a drafter remembers
_RECENT = 0.85  # kept per step of the recent sums that replace the long ones when acceptance has jumped
_OUT_OF_DATE = 1.5
_DRIFT, _ALARM = 0.5, 8.0  # of the cumulated surprise, in standard deviations: a false alarm in some thousand steps


class _Prospects:
    """One drafter: profile, forecast, and the corrections learnt for it."""

    def __init__(self, name: str, plans: tuple[Plan, ...]) -> None:
        self.name = name
        self.plans = plans
        self.index = {plan: i for i, plan in enumerate(plans)}
        self.profile = DraftProfile()
        self.forecast = Forecast(self.profile, plans)
        self.success = self.profile.success()
        self.lessons_until_forecast = 1
        self.num_forecasts = 0
        self.ratio = np.ones(len(plans))  # expected of real forests / forecast, at the same number of nodes
        self.mean_ratio = 1.0
        self.expected, self.real = 20.0, 20.0  # accepted tokens, decayed sums: how true the expectation is
        self.recent_expected, self.recent_real = 1.0, 1.0
        self.surprise = [0.0, 0.0]  # cumulated: fewer accepted than expected, more than expected
        self.rate: Floats = np.zeros(len(plans))
        self.budget = np.zeros(len(plans), np.int64)  # index of the best threshold
        self.seconds: Floats = np.zeros(len(plans))

    def refresh(self) -> None:
        self.forecast = Forecast(self.profile, self.plans)
        self.success = self.profile.success()
        self.num_forecasts += 1
        self.lessons_until_forecast = min(max(self.num_forecasts - 3, 1), _MOST_LESSONS_PER_FORECAST)

    def learn_ratio(self, plan: Plan, expected: float, nodes_per_sequence: float, num_sequences: int) -> None:
        i = self.index.get(plan)
        if i is None or nodes_per_sequence <= 0.0:
            return
        forecast = float(np.interp(nodes_per_sequence, self.forecast.nodes[i], self.forecast.accepted[i]))
        ratio = min(max(expected / num_sequences / max(forecast, 1e-6), 0.3), 3.0)
        self.mean_ratio += 0.5 * _RATIO_RATE * (ratio - self.mean_ratio)
        self.ratio[i] += _RATIO_RATE * (ratio - self.ratio[i])

    @property
    def truth(self) -> float:
        """Accepted tokens over expected ones."""
        return self.real / self.expected

    def learn_real(self, expected: float, accepted: int, num_sequences: int) -> bool:
        """Returns True when far more is accepted than the acceptance model believes: what it learnt is out of date."""
        believed = self.truth * expected
        kept = _REAL_MEMORY / (_REAL_MEMORY + expected)
        self.expected = kept * self.expected + expected
        self.real = kept * self.real + accepted
        self.recent_expected = _RECENT * self.recent_expected + expected
        self.recent_real = _RECENT * self.recent_real + accepted
        # accepted paths are about geometric in length, so that is about the variance of their sum
        deviations = (believed - accepted) / math.sqrt(believed * (1.0 + believed / num_sequences) + 0.2)
        fewer, more = self.surprise
        self.surprise = [max(fewer + deviations - _DRIFT, 0.0), max(more - deviations - _DRIFT, 0.0)]
        if max(self.surprise) < _ALARM:
            return False
        self.expected, self.real = self.recent_expected, self.recent_real
        self.start_over()
        is_out_of_date = self.truth > _OUT_OF_DATE
        if is_out_of_date:
            self.expected = self.real = 1.0
        return is_out_of_date

    def start_over(self) -> None:
        """What was learnt counts little from now on."""
        self.profile.forget()
        self.num_forecasts, self.lessons_until_forecast = 0, 1
        self.surprise = [0.0, 0.0]


class Outlook:
    """Rates of all plans at one batch."""

    def __init__(self, costs: CostModel, plans: Iterable[Plan]) -> None:
        plans = tuple(plans)
        self._costs = costs
        self.drafters = tuple(dict.fromkeys(plan.drafter for plan in plans if plan.drafter is not None))
        self._prospects = {
            name: _Prospects(name, tuple(plan for plan in plans if plan.drafter == name)) for name in self.drafters
        }
        self.deeper = {plan: _next_deeper(plan, plans) for plan in plans}
        self.best = PLAIN
        self.best_rate = 0.0
        self.best_possible_rate = 0.0  # without what the watchdog has paused
        self.runner_up = ""
        self._plain_rate = 0.0
        self._num_sequences = 0
        self._allowed: tuple[str, ...] = ()

    def evaluate(self, num_sequences: int, num_prefill_rows: int, kv_tokens: int, allowed: tuple[str, ...]) -> None:
        """Look at all plans; `best`, `best_rate` and `runner_up` are those of the allowed drafters."""
        self._num_sequences, self._allowed = num_sequences, allowed
        plain = self.plain_seconds(num_sequences, num_prefill_rows, kv_tokens)
        self._plain_rate = num_sequences / (plain - self.owed_seconds(num_prefill_rows))
        ranked = [(self._plain_rate, PLAIN)]
        self.best_possible_rate = self._plain_rate
        for name, prospects in self._prospects.items():
            self._rate(prospects, num_sequences, num_prefill_rows, kv_tokens)
            self.best_possible_rate = max(self.best_possible_rate, float(prospects.rate.max()))
            if name in allowed:
                order = np.argsort(prospects.rate)[-2:].tolist()
                ranked += [(float(prospects.rate[i]), prospects.plans[i]) for i in order]
        ranked.sort(key=lambda entry: -entry[0])
        self.best_rate, self.best = ranked[0]
        self.runner_up = ranked[1][1].name if len(ranked) > 1 else ""

    def is_within(self, plan: Plan, hysteresis: float) -> bool:
        """Is the plan still about as good as the best?"""
        return self._rate_of(plan) >= self.best_rate * (1.0 - hysteresis)

    def best_of(self, drafter: str) -> Plan:
        prospects = self._prospects[drafter]
        return prospects.plans[int(prospects.rate.argmax())]

    def has_surprised(self, drafter: str) -> bool:
        """Has it lately accepted more than was believed? Then it is worth another look soon."""
        return self._prospects[drafter].surprise[1] > 0.15 * _ALARM

    def plain_seconds(self, num_sequences: int, num_prefill_rows: int, kv_tokens: int) -> float:
        target = self._costs.table(TARGET).seconds(num_sequences + num_prefill_rows, kv_tokens)
        return target + self._costs.host_seconds(None, num_sequences)

    def owed_seconds(self, num_prefill_rows: int) -> float:
        """What prompts cost in any case. It is not counted against the trees that ride along: otherwise they would seem
        to come for nothing, and a few early sequences would run far ahead of the batch."""
        return self._costs.table(TARGET).seconds(num_prefill_rows) if num_prefill_rows else 0.0

    def optimum(self, num_sequences: int, num_prefill_rows: int, kv_tokens: int) -> float:
        plain = self.plain_seconds(num_sequences, num_prefill_rows, kv_tokens)
        rate = num_sequences / (plain - self.owed_seconds(num_prefill_rows))
        for prospects in self._prospects.values():
            self._rate(prospects, num_sequences, num_prefill_rows, kv_tokens)
            rate = max(rate, float(prospects.rate.max()))
        return rate

    def success(self, plan: Plan) -> float:
        """Expected accepted children of a node that the plan expands below its first level."""
        known = self._prospects[str(plan.drafter)].success
        return known[min(plan.branch, len(known) - 1)]

    def learn_real(self, drafter: str, *, num_sequences: int, expected: float, accepted: int) -> bool:
        """From one drafted step; True when what the acceptance model knows of the drafter is out of date."""
        return self._prospects[drafter].learn_real(expected, accepted, num_sequences)

    def learn_ratio(self, plan: Plan, *, num_sequences: int, num_nodes: int, expected: float) -> None:
        """From one drafted step: what its forest promised of `num_nodes`, against the forecast."""
        self._prospects[str(plan.drafter)].learn_ratio(plan, expected, num_nodes / num_sequences, num_sequences)

    def learn_profile(self, drafter: str, forests: list[Forest], num_sequences: int, branch: int) -> None:
        """From forests as proposed, for `num_sequences` in total."""
        if not num_sequences:
            return
        prospects = self._prospects[drafter]
        prospects.profile.observe(forests, num_sequences, branch)
        prospects.ratio += (1.0 - _RATIO_FADE) * (prospects.mean_ratio - prospects.ratio)
        prospects.lessons_until_forecast -= 1
        if prospects.lessons_until_forecast <= 0:
            prospects.refresh()

    def forget(self) -> None:
        for prospects in self._prospects.values():
            prospects.start_over()
            prospects.expected = prospects.real = 20.0
            prospects.ratio[:] = 1.0
            prospects.mean_ratio = 1.0

    def options(self) -> tuple[Option, ...]:
        """All plans as they looked at the last evaluation, best first."""
        num_sequences = self._num_sequences
        found = []
        if self._plain_rate:
            found.append(
                Option(
                    plan=PLAIN.name,
                    tokens_per_second=self._plain_rate,
                    num_tokens=float(num_sequences),
                    num_verified=0.0,
                    seconds=num_sequences / self._plain_rate,
                )
            )
        for name in self._allowed:
            prospects = self._prospects[name]
            for i, plan in enumerate(prospects.plans):
                found.append(
                    Option(
                        plan=plan.name,
                        tokens_per_second=float(prospects.rate[i]),
                        num_tokens=float(prospects.rate[i] * prospects.seconds[i]),
                        num_verified=float(prospects.forecast.nodes[i, prospects.budget[i]] * num_sequences),
                        seconds=float(prospects.seconds[i]),
                    )
                )
        return tuple(sorted(found, key=lambda option: -option.tokens_per_second))

    def _rate_of(self, plan: Plan) -> float:
        if plan.drafter is None:
            return self._plain_rate
        if plan.drafter not in self._allowed:
            return 0.0
        prospects = self._prospects[plan.drafter]
        return float(prospects.rate[prospects.index[plan]])

    def _rate(self, prospects: _Prospects, num_sequences: int, num_prefill_rows: int, kv_tokens: int) -> None:
        """Tokens/s of each plan at its best budget: [P, T] at once."""
        costs, forecast = self._costs, prospects.forecast
        draft = np.full(len(prospects.plans), float(costs.draft_seconds(prospects.name, num_sequences, first=True)))
        if draft_kind(prospects.name) in costs.tables:  # a drafter that works level by level
            level = costs.draft_seconds(prospects.name, forecast.level_rows * num_sequences)
            draft += np.where(forecast.level_rows > 0.0, level, 0.0).sum(axis=0)
        draft += costs.host_seconds(prospects.name, num_sequences)
        nodes = forecast.nodes * num_sequences
        seconds = costs.target_seconds(nodes + (num_sequences + num_prefill_rows), kv_tokens)
        seconds += draft[:, None] - self.owed_seconds(num_prefill_rows)
        truth = prospects.ratio[:, None] * prospects.truth
        rate = num_sequences * (1.0 + truth * forecast.accepted) / seconds
        prospects.budget = rate.argmax(axis=1)
        chosen = np.arange(len(prospects.plans)), prospects.budget
        prospects.rate, prospects.seconds = rate[chosen], seconds[chosen]


def _next_deeper(plan: Plan, plans: tuple[Plan, ...]) -> Plan:
    """The plan of the same shape one notch deeper, or the plan itself: the level rule stops where it does not pay.

    >>> plans = tuple(Plan(drafter="model", depth=depth) for depth in (2, 4, 8))
    >>> _next_deeper(plans[0], plans).depth, _next_deeper(plans[2], plans).depth
    (4, 8)
    """
    same_shape = [
        other
        for other in plans
        if (other.drafter, other.width, other.branch, other.max_nodes)
        == (plan.drafter, plan.width, plan.branch, plan.max_nodes)
        and other.depth > plan.depth
    ]
    return min(same_shape, key=lambda other: other.depth, default=plan)
