"""Learning from steps, some steps at a time: a numpy call costs the same for one step's nodes as for eight's.

Early on every step teaches at once. Later steps are collected; of a large batch, which shows hundreds of nodes a step,
only every eighth one is.
"""

from __future__ import annotations

import numpy as np

from rlhfspec.drafting.acceptance import AcceptanceModel
from rlhfspec.drafting.base import Forest, Outcome
from rlhfspec.drafting.cost import TARGET, CostModel, draft_kind, host_kind

_STEPS_PER_LESSON = 8
_LARGE_BATCH, _LARGE_STEPS_PER_LESSON, _LARGE_STRIDE = 32, 32, 8
_ENOUGH_NODES = 512  # of proposed forests, for one update of a draft profile


class Lessons:
    """Outcomes waiting to be learnt from."""

    def __init__(self, acceptance: AcceptanceModel | None) -> None:
        self._acceptance = acceptance
        self._num_lessons = 0
        self._num_steps = 0  # since the last lesson, drafted or not
        self._last_collected = -_LARGE_STRIDE  # in the same count
        self._outcomes: list[Outcome] = []
        self._proposed: list[Forest] = []  # as drafted, one for each of _outcomes

    def add(self, outcome: Outcome, proposed: Forest) -> None:
        self._num_steps += 1
        is_large = len(outcome.state.rows) >= _LARGE_BATCH and self._num_lessons > 4
        is_wanted = not is_large or self._num_steps - self._last_collected >= _LARGE_STRIDE
        if outcome.plan.drafter is not None and is_wanted:
            self._outcomes.append(outcome)
            self._proposed.append(proposed)
            self._last_collected = self._num_steps

    @property
    def is_due(self) -> bool:
        if not self._outcomes:
            return False
        is_large = len(self._outcomes[-1].state.rows) >= _LARGE_BATCH
        most = _LARGE_STEPS_PER_LESSON if is_large else _STEPS_PER_LESSON
        return self._num_steps >= min(1 << min(self._num_lessons, 8), most)

    def teach(self) -> list[tuple[Outcome, Forest]]:
        """Teach the acceptance model; returns what was collected, oldest first, with the forests as drafted."""
        collected = list(zip(self._outcomes, self._proposed, strict=True))
        if self._acceptance is not None:
            for drafter in dict.fromkeys(str(outcome.plan.drafter) for outcome in self._outcomes):
                _teach(self._acceptance, drafter, [o for o in self._outcomes if o.plan.drafter == drafter])
        self._clear()
        self._num_lessons += 1
        return collected

    def start_over(self) -> None:
        """Weights changed: what is collected belongs to the old ones, and new lessons are short again."""
        self._clear()
        self._num_lessons = 0

    def _clear(self) -> None:
        self._outcomes, self._proposed = [], []
        self._last_collected -= self._num_steps
        self._num_steps = 0


def _teach(acceptance: AcceptanceModel, drafter: str, outcomes: list[Outcome]) -> None:
    tested = np.flatnonzero(np.concatenate([outcome.reached for outcome in outcomes]))
    acceptance.observe(
        drafter,
        np.concatenate([outcome.state.rows[outcome.forest.sequence] for outcome in outcomes])[tested],
        np.concatenate([outcome.forest.depth for outcome in outcomes])[tested],
        np.concatenate([outcome.forest.rank for outcome in outcomes])[tested],
        np.concatenate([outcome.forest.gap for outcome in outcomes])[tested],
        np.concatenate([outcome.accepted for outcome in outcomes])[tested],
    )


def latest_forests(collected: list[tuple[Outcome, Forest]], drafter: str) -> tuple[list[Forest], int, int]:
    """The drafter's last forests of one and the same plan: (forests, their number of sequences, the plan's branch)."""
    forests: list[Forest] = []
    num_sequences = num_nodes = 0
    plan = None
    for outcome, forest in reversed(collected):
        if outcome.plan.drafter != drafter or (plan is not None and outcome.plan != plan):
            continue
        plan = outcome.plan
        forests.append(forest)
        num_sequences += len(outcome.state.rows)
        num_nodes += forest.size
        if num_nodes >= _ENOUGH_NODES:
            break
    return forests, num_sequences, plan.branch if plan is not None else 0


def observe_costs(costs: CostModel, outcome: Outcome, *, learn: bool = True) -> tuple[float, float]:
    """What is predicted for the verification and for the host; if asked, teach both tables what was true."""
    state, num_sequences = outcome.state, len(outcome.state.rows)
    rows = num_sequences + state.num_prefill_rows + outcome.forest.size
    if rows == 0:
        return 0.0, 0.0
    kv_tokens = state.kv_tokens
    if not learn:
        host_seconds = costs.host_seconds(outcome.plan.drafter, num_sequences)
        return costs.table(TARGET).seconds(rows, kv_tokens), host_seconds
    rest = max(outcome.step_seconds - outcome.draft_seconds - outcome.verify_seconds, 1e-6)
    verify_seconds = costs.observe(TARGET, rows, outcome.verify_seconds, kv_tokens)
    return verify_seconds, costs.observe(host_kind(outcome.plan.drafter), num_sequences, rest)


def predicted_draft_seconds(
    costs: CostModel, drafter: str, num_sequences: int, levels: list[tuple[int, float]]
) -> float:
    """Of the (rows, seconds) levels that were run; a drafter that works in one go has none."""
    seconds = costs.table(draft_kind(drafter, first=True)).seconds(num_sequences)
    if len(levels) > 1:
        deeper = costs.table(draft_kind(drafter))
        seconds += sum(deeper.seconds(rows) for rows, _ in levels[1:])
    return seconds


def observe_draft(costs: CostModel, outcome: Outcome, levels: list[tuple[int, float]], step: int) -> None:
    """Teach the draft tables; of several deeper levels, each step teaches one."""
    name = str(outcome.plan.drafter)
    first_seconds = levels[0][1] if levels else outcome.draft_seconds
    costs.observe(draft_kind(name, first=True), len(outcome.state.rows), first_seconds)
    if len(levels) > 1:
        rows, seconds = levels[1 + step % (len(levels) - 1)]
        costs.observe(draft_kind(name), rows, seconds)
