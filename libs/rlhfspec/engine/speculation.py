"""The engine's side of drafting: which drafters there are, the draft's own namespace, and who chooses.

Switching strategy, drafter or selector never touches a sequence: by the law it cannot change its tokens.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from rlhfspec.drafting.acceptance import AcceptanceModel
from rlhfspec.drafting.base import (
    PLAIN,
    BatchState,
    Choice,
    DraftBatch,
    Drafter,
    FloatArray,
    Forest,
    IntArray,
    Outcome,
    Plan,
    Selector,
    empty_forest,
)
from rlhfspec.drafting.cost import CostModel
from rlhfspec.drafting.levels import LevelTerms
from rlhfspec.drafting.model import Expanded, Floats, Grown, ModelDrafter, Roots, Rows
from rlhfspec.drafting.plans import default_plans, static_grid
from rlhfspec.drafting.selector import AdaptiveSelector, FixedSelector
from rlhfspec.drafting.suffix import SuffixDrafter
from rlhfspec.drafting.tree import Walk, index_in_sequence
from rlhfspec.engine.cache import SlotTable
from rlhfspec.engine.profile import profile, unmeasured
from rlhfspec.engine.runner import ModelRunner
from rlhfspec.engine.sequences import Sequence
from rlhfspec.errors import InvalidRequest
from rlhfspec.kernels import draft, gumbel
from rlhfspec.kernels.draft import NativeDraft
from rlhfspec.kernels.tree_attention import AttentionMeta

if TYPE_CHECKING:
    from rlhfspec.engine.core import Engine


class DraftSpace:
    """The draft model's namespace in the paged cache: same blocks, own KV, own permutation of slots."""

    def __init__(self, engine: Engine, runner: ModelRunner, table: SlotTable) -> None:
        self.engine = engine
        self.runner = runner
        self.table = table
        self.computed = np.zeros(engine.pool.num_blocks, np.bool_)  # shared blocks whose draft KV is there
        self._native: NativeDraft | None = None

    def candidates(self, rows: Rows, slot_table: IntArray, k: int) -> tuple[IntArray, FloatArray]:
        meta = AttentionMeta(
            slots=rows.slots, table_rows=rows.table_rows, context_lens=rows.context_lens,
            extra=rows.extra, slot_table=slot_table,
        )  # fmt: skip
        logits = self.runner.forward(rows.tokens, rows.positions, meta, rows.logit_rows)
        if not len(rows.logit_rows):
            return np.empty((0, k), np.int32), np.empty((0, k), np.float32)
        tokens, scores = gumbel.candidates(logits, rows.seeds, rows.noise_positions, rows.temperatures, k)
        return tokens.cpu().numpy(), scores.cpu().numpy()

    def grow(
        self, batch: DraftBatch, plan: Plan, roots: Roots, curves: tuple[Floats, Floats], terms: LevelTerms | None
    ) -> Grown | None:
        native = self._native_draft()
        if native is None:
            return None
        log_odds, shifts = curves
        grown = native.grow(
            rows=batch.rows, lengths=batch.lengths, prompt_lengths=batch.prompt_lengths, room=batch.room,
            seeds=batch.seeds, temperatures=batch.temperatures, shifts=shifts,
            capacity=self.table.capacity, slot_table=self.table.slots,
            roots=roots.sequence, tokens=roots.tokens, scores=roots.scores, log_odds=log_odds,
            depth=plan.depth, width=plan.width, branch=plan.branch, terms=terms,
        )  # fmt: skip
        sequence, parent, depth, token, rank = grown.nodes
        gap, path_acceptance = grown.chances
        forest = Forest(
            sequence=sequence, parent=parent, depth=depth, token=token, rank=rank,
            gap=gap, path_acceptance=path_acceptance,
        )  # fmt: skip
        return Grown(forest, Expanded(grown.expanded, grown.level_rows), grown.level_seconds.tolist())

    def keep(self, batch: DraftBatch, expanded: Expanded, new_lengths: IntArray, cached: IntArray) -> bool:
        return draft.keep(
            expanded.nodes, expanded.level_rows, rows=batch.rows, lengths=batch.lengths, new_lengths=new_lengths,
            tokens=batch.tokens, slot_table=self.table.slots, cached=cached,
        )  # fmt: skip

    def draft_slots(self) -> IntArray:
        return self.table.slots

    def draft_capacity(self) -> IntArray:
        return self.table.capacity

    def reusable_prefix(self, row: int) -> int:
        sequence = self.engine.by_row[row]
        computed = self.computed[sequence.blocks[: sequence.num_shared_blocks]]
        leading = len(computed) if computed.all() else int(computed.argmin())
        return leading * self.table.block_size

    def prefix_computed(self, row: int, length: int) -> None:
        sequence = self.engine.by_row[row]
        whole = min(length // self.table.block_size, len(sequence.prefix_hashes))
        self.computed[sequence.blocks[:whole]] = True

    def _native_draft(self) -> NativeDraft | None:
        decoder = self.runner.native
        if decoder is not None and (self._native is None or self._native.decoder is not decoder):
            self._native = NativeDraft(decoder)
        return self._native if decoder is not None else None

    def release(self, blocks: list[int]) -> None:
        """Private again, or about to be: whoever gets the block next starts without draft KV."""
        self.computed[blocks] &= self.engine.pool.references[blocks] > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The trees of one step, and how they came about."""

    plan: Plan
    state: BatchState
    forest: Forest  # the nodes to verify
    num_proposed: int = 0
    choice: Choice | None = None
    seconds: float = 0.0


class Speculation:
    """Holds drafters, statistics and the selector, and runs one proposal."""

    def __init__(self, engine: Engine, draft: ModelRunner | None) -> None:
        self.engine = engine
        config = engine.config
        self.draft_table = SlotTable(config.max_sequences, config.table_width, config.block_size)
        self.space = None if draft is None else DraftSpace(engine, draft, self.draft_table)
        self.drafters: dict[str, Drafter] = {"suffix": SuffixDrafter()}
        self.model_drafter: ModelDrafter | None = None
        if self.space is not None:
            self.model_drafter = ModelDrafter(self.space, config.max_sequences)
            self.drafters["model"] = self.model_drafter
        self.acceptance = AcceptanceModel(config.max_sequences)
        self.costs = CostModel()
        self.used: list[Drafter] = []
        self.selector: Selector = FixedSelector(PLAIN)
        self._selectors: dict[str | Plan, Selector] = {}  # one a mode: coming back to it, it knows what it learnt

    def choose(self, speculation: str | Plan) -> None:
        """Install the selector for a mode: off, a drafter's name, adaptive, a static strategy, or a Plan."""
        if not self.costs.tables and speculation != "off":
            self.costs = profile(self.engine) if self.engine.config.profile else unmeasured()
        if speculation not in self._selectors:
            self._selectors[speculation] = self._selector(speculation)
        self.selector = self._selectors[speculation]
        wanted = self._drafters_of(speculation)
        for drafter in wanted:
            if drafter not in self.used:
                for sequence in self.engine.scheduler.running:
                    self._start_one(drafter, sequence)
        self.used = wanted

    def propose(self, state: BatchState, decode_rows: IntArray) -> Proposal:
        """Choose a plan, draft trees for it, and keep the nodes worth verifying."""
        plan = self.selector.plan(state) if len(decode_rows) else PLAIN
        if plan.drafter is None:
            return Proposal(plan=plan, state=state, forest=empty_forest())
        began = time.perf_counter()
        wanted = min(plan.depth * plan.width * plan.branch, self.engine.config.tree_slots)
        self.engine.scheduler.make_tree_room(decode_rows, wanted)
        rule = self.selector.rule(plan, state)
        forest = self.drafters[plan.drafter].propose(self.batch(decode_rows), plan, self.acceptance, rule)
        seconds = time.perf_counter() - began
        choice = self.selector.budget(plan, state, forest, seconds)
        return Proposal(
            plan=plan, state=state, forest=self._fitting(forest.take(choice.keep), decode_rows),
            num_proposed=forest.size, choice=choice, seconds=seconds,
        )  # fmt: skip

    def learn(
        self, proposal: Proposal, walk: Walk, drafted_for: DraftBatch, *,
        num_committed: int, verify_seconds: float, step_seconds: float,
    ) -> None:  # fmt: skip
        """Tell drafters and selector what happened; `drafted_for` is the batch before the commit."""
        if not drafted_for.size:
            return
        lengths = self.engine.rows.lengths[drafted_for.rows]
        for drafter in self.used:
            drafter.observe(drafted_for, lengths)
        outcome = Outcome(
            plan=proposal.plan, state=proposal.state, forest=proposal.forest,
            reached=walk.reached, accepted=walk.accepted,
            num_committed=num_committed, num_proposed=proposal.num_proposed, choice=proposal.choice,
            draft_seconds=proposal.seconds, verify_seconds=verify_seconds, step_seconds=step_seconds,
        )  # fmt: skip
        self.selector.observe(outcome)

    def batch(self, decode_rows: IntArray) -> DraftBatch:
        rows = self.engine.rows
        lengths = rows.lengths[decode_rows]
        return DraftBatch(
            rows=decode_rows,
            lengths=lengths,
            prompt_lengths=rows.prompt_lengths[decode_rows],
            room=rows.limits[decode_rows] - lengths,
            seeds=rows.seeds[decode_rows],
            temperatures=rows.temperatures[decode_rows],
            tokens=rows.tokens,
            weights_version=self.engine.weights_version,
        )

    def start(self, sequence: Sequence) -> None:
        for drafter in self.used:
            self._start_one(drafter, sequence)

    def forget(self, sequence: Sequence) -> None:
        for drafter in self.drafters.values():
            drafter.forget(sequence.row)
        self.acceptance.forget(sequence.row)
        if self.space is not None:
            self.space.release(sequence.blocks)

    def reset(self) -> None:
        """The target's weights changed."""
        for drafter in self.drafters.values():
            drafter.reset()
        self.selector.reset()
        self._selectors = {mode: kept for mode, kept in self._selectors.items() if kept is self.selector}
        if self.space is not None:
            self.space.computed[:] = False

    def load_draft_weights(self, state_dict: dict[str, torch.Tensor]) -> None:
        if self.space is None:
            raise InvalidRequest("draft_state_dict", "given", "this engine has no draft model")
        self.space.runner.load_weights(state_dict)

    def _fitting(self, forest: Forest, decode_rows: IntArray) -> Forest:
        """Drop nodes for which a sequence owns no free slot (memory is short); later nodes go first."""
        table = self.engine.table
        free = table.capacity[decode_rows] - self.engine.rows.lengths[decode_rows]
        fits = index_in_sequence(forest, len(decode_rows)) < free[forest.sequence]
        return forest if fits.all() else forest.take(np.flatnonzero(fits).astype(np.int32))

    def _start_one(self, drafter: Drafter, sequence: Sequence) -> None:
        length = int(self.engine.rows.lengths[sequence.row])
        drafter.start(
            sequence.row, self.engine.rows.tokens[sequence.row, :length], sequence.group, sequence.request.history
        )

    def _names(self) -> list[str]:
        return sorted(self.drafters)

    def _selector(self, speculation: str | Plan) -> Selector:
        grid = {"off": PLAIN, **static_grid(self._names())}
        plan = speculation if isinstance(speculation, Plan) else grid.get(speculation)
        if plan is not None:
            return FixedSelector(plan, costs=self.costs if self.costs.tables else None, acceptance=self.acceptance)
        if speculation in self.drafters or speculation == "adaptive":
            names = self._names() if speculation == "adaptive" else [speculation]
            return AdaptiveSelector(self.costs, self.acceptance, default_plans(names, self.engine.config.max_sequences))
        if speculation == "model":
            raise InvalidRequest("speculation", speculation, "needs a draft model: give drafter=PATH")
        known = ", ".join(["adaptive", *self._names(), *grid])
        raise InvalidRequest("speculation", speculation, f"must be one of {known}")

    def _drafters_of(self, speculation: str | Plan) -> list[Drafter]:
        if speculation == "adaptive":
            return list(self.drafters.values())
        if isinstance(speculation, str) and speculation in self.drafters:
            return [self.drafters[speculation]]
        plan = speculation if isinstance(speculation, Plan) else static_grid(self._names()).get(speculation, PLAIN)
        return [] if plan.drafter is None else [self.drafters[plan.drafter]]
