"""Drafters and selectors of an engine. Switching them never changes tokens (docs/law.md)."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
import torch

from rlhfspec.common import kept
from rlhfspec.common.arrays import IntArray
from rlhfspec.engine.drafting.acceptance import AcceptanceModel
from rlhfspec.engine.drafting.base import (
    PLAIN,
    BatchState,
    DraftBatch,
    DraftChoice,
    Drafter,
    DraftOutcome,
    DraftPlan,
    Forest,
    Selector,
    empty_forest,
)
from rlhfspec.engine.drafting.cost import TARGET, CostModel, CostTable, draft_kind
from rlhfspec.engine.drafting.fixed import FixedSelector, static_grid
from rlhfspec.engine.drafting.outlook import default_plans
from rlhfspec.engine.drafting.selector import AdaptiveSelector
from rlhfspec.engine.drafting.tree import Walk, index_in_sequence
from rlhfspec.engine.forward.draft_forward import DraftForward
from rlhfspec.engine.forward.profile import profile, unmeasured
from rlhfspec.engine.kv.cache import give_back
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.engine.scheduling.scheduler import Scheduler, StepRows
from rlhfspec.engine.scheduling.sequences import Sequence
from rlhfspec.errors import InvalidRequest
from rlhfspec.huggingface.devices import name_of
from rlhfspec.job.choices.drafters import ADAPTIVE, DRAFTERS, OFF
from rlhfspec.messages.records.models import Drafting

log = logging.getLogger(__name__)
_DEEPEST = 16  # of the drafts by which `drafter: auto` decides
_LEAST_GAIN = 1.05  # over plain decoding, or `drafter: auto` uses no draft model


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    plan: DraftPlan
    state: BatchState
    batch: DraftBatch  # the decoding sequences before this step's commit
    forest: Forest  # the nodes to verify
    num_proposed: int = 0
    choice: DraftChoice | None = None
    seconds: float = 0.0
    requantise_seconds: float = 0.0  # once for all drafts with the same weights

    @property
    def num_drafting(self) -> int:
        """Return the number of sequences, the first of the batch, that the plan drafts for."""
        return self.batch.first(self.plan.num_sequences).size


class Speculator:
    def __init__(self, state: EngineState, scheduler: Scheduler) -> None:
        self.state = state
        self.scheduler = scheduler
        self.drafters = _drafters(state)
        self.acceptance = AcceptanceModel(state.config.max_sequences)
        self.costs = CostModel()
        self.used: list[Drafter] = []
        self.selector: Selector = FixedSelector(PLAIN)
        self._selectors: dict[str | DraftPlan, Selector] = {}  # one per mode, which keeps what it learnt
        self._num_rows = 1  # of the last batch
        self._totals: dict[str, tuple[int, int, float]] = {}  # by drafter: verifications, tokens, seconds saved

    def choose(self, speculation: str | DraftPlan) -> None:
        """Switch to a mode: off, adaptive, a drafter's name, a static strategy's name, or a DraftPlan."""
        if speculation != OFF:
            self._fill_costs()
        if speculation not in self._selectors:
            self._selectors[speculation] = self._selector(speculation)
        self.selector = self._selectors[speculation]
        wanted = self._drafters_of(speculation)
        for drafter in wanted:
            if drafter not in self.used:
                for sequence in self.scheduler.running:
                    self._start_one(drafter, sequence)
        self.used = wanted

    def measure(self) -> None:
        """Measure and learn the costs of steps even without drafts, because the service of clients needs them."""
        if not self.costs.tables:
            self._fill_costs()
            self.selector = self._selectors[OFF] = self._selector(OFF)

    def _fill_costs(self) -> None:
        """Fill the cost tables if there are none. If they were measured, go without what they show not to pay."""
        if self.costs.tables:
            return
        is_measured = self.state.config.profile and not self.state.by_row
        self.costs = self._profile() if is_measured else unmeasured()
        if is_measured:
            self._go_without_what_cannot_pay(self.costs)

    def _go_without_what_cannot_pay(self, costs: CostModel) -> None:
        few_bits = self.state.few_bits
        if few_bits is not None and few_bits.is_optional and not _pays(costs, few_bits.expected_acceptance):
            log.info("self-drafting is off: the policy's quantised copy is not fast enough on this machine")
            self.state.draft = self.state.few_bits = None
            self.drafters = _drafters(self.state)

    def _profile(self) -> CostModel:
        self.scheduler.drop_kv()
        few_bits = self.state.few_bits
        if few_bits is not None and few_bits.is_optional:  # one row shows what can never pay
            self._go_without_what_cannot_pay(profile(self.state, only_one_row=True))
        config, runners = self.state.config, [space.runner for space in self.state.spaces]
        key = kept.key_of(
            "costs", [runner.architecture for runner in runners], self.state.few_bits is not None,
            self.state.eagle and self.state.eagle.shapes, config.max_sequences,
            config.max_context, name_of(runners[0].config.device), torch.get_num_threads(),
        )  # fmt: skip
        if (found := kept.read(key)) is not None:
            return CostModel({kind: CostTable(**table) for kind, table in found.items()})
        costs = profile(self.state)
        kept.write(key, {kind: table.to_dict() for kind, table in costs.tables.items()})
        for runner in runners:
            give_back(runner.kv)
        return costs

    def propose(self, schedule: StepRows) -> Proposal:
        decode_rows, state = schedule.decode_rows, self._batch_state(schedule)
        plan = self.selector.plan(state) if len(decode_rows) else PLAIN
        requantise_seconds = self._requantise_for(plan)
        began = time.perf_counter()
        batch = self.batch(decode_rows)
        if plan.drafter is None:
            return Proposal(plan=plan, state=state, batch=batch, forest=empty_forest())
        wanted = min(plan.depth * plan.width * plan.branch, self.state.config.tree_slots)
        self.scheduler.make_tree_room(decode_rows, wanted)
        rule = self.selector.rule(plan, state)
        forest = self.drafters[plan.drafter].propose(batch.first(plan.num_sequences), plan, self.acceptance, rule)
        seconds = time.perf_counter() - began
        choice = self.selector.budget(plan, state, forest, seconds)
        return Proposal(
            plan=plan, state=state, batch=batch, forest=self._fitting(forest.take(choice.keep), decode_rows),
            num_proposed=forest.size, choice=choice, seconds=seconds, requantise_seconds=requantise_seconds,
        )  # fmt: skip

    def _requantise_for(self, plan: DraftPlan) -> float:
        few_bits = self.state.few_bits
        if few_bits is None or not few_bits.is_stale or plan.drafter is None:
            return 0.0
        return few_bits.requantise() if DRAFTERS[plan.drafter].runs_draft_model else 0.0

    def _batch_state(self, schedule: StepRows) -> BatchState:
        rows = schedule.decode_rows
        lengths, draft = self.state.rows.lengths[rows], self.state.draft
        most, num_rows = schedule.most_rows, len(rows) + schedule.num_prefill_tokens
        return BatchState(
            rows=rows,
            room=self.state.rows.limits[rows] - lengths,
            num_prefill_rows=schedule.num_prefill_tokens,
            kv_tokens=int(lengths.sum()) + schedule.num_prefill_tokens,
            unseen=np.zeros_like(lengths) if draft is None else np.maximum(lengths - 1 - draft.cached[rows], 0),
            most_nodes=None if most is None else max(most - num_rows, 0),
        )

    def learn(
        self, proposal: Proposal, walk: Walk, kept: IntArray, *, verify_seconds: float, step_seconds: float
    ) -> None:
        batch = proposal.batch
        if not batch.size:
            return
        num_committed, lengths = int(kept.sum()), self.state.rows.lengths[batch.rows]
        for each in self.used:
            each.observe(batch, lengths)
        outcome = DraftOutcome(
            plan=proposal.plan, state=proposal.state, forest=proposal.forest,
            reached=walk.reached, accepted=walk.accepted,
            num_committed=num_committed, num_proposed=proposal.num_proposed, choice=proposal.choice,
            draft_seconds=proposal.seconds, verify_seconds=verify_seconds,
            step_seconds=step_seconds - proposal.requantise_seconds,
        )  # fmt: skip
        self.selector.observe(outcome)
        self._num_rows, drafter = batch.size, proposal.plan.drafter
        if drafter is not None:
            owed = proposal.state.num_prefill_rows
            plain = self.costs.plain_seconds(batch.size, owed, proposal.state.kv_tokens) * num_committed / batch.size
            drafting = proposal.num_drafting
            more = drafting, int(kept[:drafting].sum()), plain + self.costs.owed_seconds(owed) - step_seconds
            before = self._totals.get(drafter, (0, 0, 0.0))
            self._totals[drafter] = before[0] + more[0], before[1] + more[1], before[2] + more[2]

    def drafting(self) -> tuple[Drafting, ...]:
        return tuple(
            Drafting(
                drafter=name,
                acceptance=self.acceptance.by_depth(name),
                level_share=self.costs.level_share(name, self._num_rows),
                num_verifications=num_verifications,
                num_tokens=num_tokens,
                saved_seconds=saved_seconds,
            )
            for name, (num_verifications, num_tokens, saved_seconds) in self._totals.items()
        )

    def batch(self, decode_rows: IntArray) -> DraftBatch:
        rows = self.state.rows
        lengths = rows.lengths[decode_rows]
        return DraftBatch(
            rows=decode_rows,
            lengths=lengths,
            prompt_lengths=rows.prompt_lengths[decode_rows],
            room=rows.limits[decode_rows] - lengths,
            seeds=rows.seeds[decode_rows],
            temperatures=rows.temperatures[decode_rows],
            tokens=rows.tokens,
            weights_version=self.state.weights_version,
        )

    def start(self, sequence: Sequence) -> None:
        for drafter in self.used:
            self._start_one(drafter, sequence)

    def forget(self, sequence: Sequence) -> None:
        for drafter in self.drafters.values():
            drafter.forget(sequence.row)
        self.acceptance.forget(sequence.row)

    def learnt(self, sequence: Sequence) -> tuple[tuple[str, float, float], ...]:
        """Return `AcceptanceModel.learnt` of one sequence, which moves with it."""
        return self.acceptance.learnt(sequence.row) if sequence.has_row else ()

    def take_over(self, sequence: Sequence, learnt: tuple[tuple[str, float, float], ...]) -> None:
        if sequence.has_row:
            self.acceptance.take_over(sequence.row, [entry for entry in learnt if entry[0] in self.drafters])

    def reset(self) -> None:
        for drafter in self.drafters.values():
            drafter.reset()
        self.selector.reset()
        self._selectors = {mode: kept for mode, kept in self._selectors.items() if kept is self.selector}

    def _fitting(self, forest: Forest, decode_rows: IntArray) -> Forest:
        """Drop the last nodes of sequences without enough free slots for them."""
        table = self.state.target.table
        free = table.capacity[decode_rows] - self.state.rows.lengths[decode_rows]
        fits = index_in_sequence(forest, len(decode_rows)) < free[forest.sequence]
        return forest if fits.all() else forest.take(np.flatnonzero(fits).astype(np.int32))

    def _start_one(self, drafter: Drafter, sequence: Sequence) -> None:
        length = int(self.state.rows.lengths[sequence.row])
        drafter.start(
            sequence.row, self.state.rows.tokens[sequence.row, :length], sequence.group, sequence.request.history
        )

    def _names(self) -> list[str]:
        return sorted(self.drafters)

    def _selector(self, speculation: str | DraftPlan) -> Selector:
        grid = {OFF: PLAIN, **static_grid(self._names())}
        plan = speculation if isinstance(speculation, DraftPlan) else grid.get(speculation)
        if plan is not None:
            return FixedSelector(plan, costs=self.costs if self.costs.tables else None, acceptance=self.acceptance)
        if speculation in self.drafters or speculation == ADAPTIVE:
            names = self._names() if speculation == ADAPTIVE else [speculation]
            return AdaptiveSelector(self.costs, self.acceptance, default_plans(names))
        if speculation in DRAFTERS:
            raise InvalidRequest("speculation", speculation, "needs a draft model: give drafter=PATH")
        known = ", ".join([ADAPTIVE, *self._names(), *grid])
        raise InvalidRequest("speculation", speculation, f"must be one of {known}")

    def _drafters_of(self, speculation: str | DraftPlan) -> list[Drafter]:
        if speculation == ADAPTIVE:
            return list(self.drafters.values())
        if isinstance(speculation, str) and speculation in self.drafters:
            return [self.drafters[speculation]]
        plan = speculation if isinstance(speculation, DraftPlan) else static_grid(self._names()).get(speculation, PLAIN)
        return [] if plan.drafter is None else [self.drafters[plan.drafter]]


def _pays(costs: CostModel, acceptance: float) -> bool:
    """Return whether drafting for one sequence pays at this acceptance."""
    target, depths = costs.table(TARGET), np.arange(1, _DEEPEST + 1)
    tokens = 1.0 + (acceptance**depths).cumsum()
    seconds = target.seconds_array(1 + depths) + depths * costs.table(draft_kind("model")).seconds(1)
    return bool((tokens / seconds).max() > _LEAST_GAIN / target.seconds(1))


def _drafters(state: EngineState) -> dict[str, Drafter]:
    made: dict[str, Drafter] = {}
    for name, entry in DRAFTERS.items():
        if not entry.runs_draft_model:
            made[name] = entry.load()()
        elif state.draft is not None:
            made[name] = entry.load()(DraftForward(state.draft, state.by_row))
        elif state.eagle is not None:
            made[name] = entry.load()(state.eagle)
    return made
