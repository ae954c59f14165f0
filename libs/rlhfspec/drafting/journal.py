"""What a selector did and why: written down at every step, turned into plain dataclasses when somebody asks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from rlhfspec.drafting.base import Outcome
from rlhfspec.drafting.cost import CostModel
from rlhfspec.drafting.watchdog import WatchdogEvent

_NUM_DECISIONS = 128

_Seconds = tuple[float, float, float]  # draft, verification, host


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """One step: what was expected of it and what came."""

    step: int
    plan: str
    is_probe: bool  # tried to learn, not because it looked best
    runner_up: str
    num_sequences: int
    num_prefill_rows: int
    num_proposed: int  # nodes drafted
    num_verified: int  # nodes kept by the budget: N
    predicted_accepted: float
    accepted: int
    predicted_draft_seconds: float
    draft_seconds: float
    predicted_verify_seconds: float
    verify_seconds: float
    predicted_seconds: float
    seconds: float
    selector_seconds: float

    @property
    def tokens_per_second(self) -> float:
        return (self.num_sequences + self.accepted) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A plan as it looks at the current batch."""

    plan: str
    tokens_per_second: float
    num_tokens: float  # expected of one step, over the batch
    num_verified: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """The state of a selector. `share_of_step`: its own time over the time of all steps."""

    decisions: tuple[Decision, ...]  # the last ones, oldest first
    options: tuple[Option, ...]  # best first; empty for a fixed selector
    mape: dict[str, float]  # by kind of cost, and "step"
    share_of_step: float
    realised_of_optimum: float  # tokens/s against what the measured tables and acceptance allow; nan when unknown
    events: tuple[WatchdogEvent, ...]


class Journal:
    """Decisions, times and errors of one selector."""

    def __init__(self, costs: CostModel | None) -> None:
        self._costs = costs
        self._entries: deque[tuple[int, Outcome, bool, _Seconds, float]] = deque(maxlen=_NUM_DECISIONS)
        self.num_steps = 0
        self._selector_seconds = 0.0  # of the current step
        self.start_totals()

    def start_totals(self) -> None:
        """Count the selector's share and the share of the optimum from here on."""
        self.total_selector_seconds = 0.0
        self._total_seconds = 0.0
        self._judged_seconds = 0.0  # of steps whose optimum is known
        self._optimum_seconds = 0.0

    def spend(self, started: float) -> None:
        self._selector_seconds += perf_counter() - started

    def close(self, outcome: Outcome, *, is_probe: bool, predicted: _Seconds, optimum: float, started: float) -> None:
        """The step is over. `predicted`: draft, verification, host; `optimum`: the best tokens/s, 0 = unknown."""
        if self._costs is not None:
            self._costs.record_error("step", sum(predicted), outcome.step_seconds)
        if optimum:
            self._optimum_seconds += outcome.num_committed / optimum
            self._judged_seconds += outcome.step_seconds
        self._total_seconds += outcome.step_seconds
        self.spend(started)
        self._entries.append((self.num_steps, outcome, is_probe, predicted, self._selector_seconds))
        self.num_steps += 1
        self.total_selector_seconds += self._selector_seconds
        self._selector_seconds = 0.0

    def explain(self, options: tuple[Option, ...], events: Iterable[WatchdogEvent]) -> Explanation:
        costs = self._costs
        return Explanation(
            decisions=tuple(_decision(*entry) for entry in self._entries),
            options=options,
            mape={kind: costs.mape(kind) for kind in costs.error_kinds()} if costs is not None else {},
            share_of_step=self.total_selector_seconds / self._total_seconds if self._total_seconds else 0.0,
            realised_of_optimum=self._optimum_seconds / self._judged_seconds if self._optimum_seconds else math.nan,
            events=tuple(events),
        )


def _decision(step: int, outcome: Outcome, is_probe: bool, predicted: _Seconds, selector_seconds: float) -> Decision:
    choice = outcome.choice
    draft_seconds, verify_seconds, host_seconds = predicted
    return Decision(
        step=step,
        plan=outcome.plan.name,
        is_probe=is_probe,
        runner_up=choice.runner_up if choice else "",
        num_sequences=len(outcome.state.rows),
        num_prefill_rows=outcome.state.num_prefill_rows,
        num_proposed=outcome.num_proposed,
        num_verified=outcome.forest.size,
        predicted_accepted=choice.predicted_accepted if choice else 0.0,
        accepted=int(np.count_nonzero(outcome.accepted)),
        predicted_draft_seconds=draft_seconds,
        draft_seconds=outcome.draft_seconds,
        predicted_verify_seconds=verify_seconds,
        verify_seconds=outcome.verify_seconds,
        predicted_seconds=draft_seconds + verify_seconds + host_seconds,
        seconds=outcome.step_seconds,
        selector_seconds=selector_seconds,
    )
