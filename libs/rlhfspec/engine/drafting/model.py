"""Drafting with a smaller model in its own KV space, adding the target's noise to its log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlhfspec.common.arrays import FloatArray, Floats, IntArray
from rlhfspec.engine.drafting.acceptance import AcceptanceModel
from rlhfspec.engine.drafting.base import Acceptance, DraftBatch, DraftPlan, Forest, LevelRule, empty_forest
from rlhfspec.engine.drafting.budget import best_nodes
from rlhfspec.engine.drafting.fixed import Always
from rlhfspec.engine.drafting.levels import LevelTerms, PayingLevel

_LARGEST_GAP = 30.0
_NO_CANDIDATE = np.float32(-1e30)
_MAX_CATCH_UP_ROWS = 512  # per forward; longer gaps take several


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRows:
    tokens: IntArray  # [N]
    positions: IntArray  # [N]
    slots: IntArray  # [N]
    table_rows: IntArray  # [N]
    context_lens: IntArray  # [N]
    extra: IntArray  # [N, E] slots of drafted ancestors and itself
    logit_rows: IntArray  # [n] rows whose candidates are wanted
    seeds: npt.NDArray[np.uint64]  # [n]
    noise_positions: IntArray  # [n] response position of the token after the row
    temperatures: FloatArray  # [n]


@dataclass(frozen=True, slots=True)
class Expanded:
    """Nodes that the draft model ran, level by level, so that accepted ones can keep their KV."""

    nodes: IntArray  # [4, E] sequence, parent (in the level above, -1 = root), token, place in the row's slot table
    level_rows: npt.NDArray[np.int64]  # [levels]


@dataclass(frozen=True, slots=True)
class GrownTrees:
    forest: Forest
    expanded: Expanded


@dataclass(frozen=True, slots=True, kw_only=True)
class Roots:
    sequence: IntArray  # [n] ascending
    tokens: IntArray  # [n, k]
    scores: FloatArray  # [n, k]


class DraftEngine(Protocol):
    """Engine interface of the draft model: its forward and its KV space."""

    @property
    def slots(self) -> IntArray:
        """Return the slot table [R, L] of the draft's KV."""
        ...

    @property
    def capacity(self) -> IntArray: ...

    @property
    def cached(self) -> IntArray:
        """Return the numbers [R] of leading positions with valid draft KV."""
        ...

    def candidates(self, rows: DraftRows, k: int) -> tuple[IntArray, FloatArray]:
        """Run the rows; return the best k tokens after each of `logit_rows`, and their perturbed scores [n, k]."""
        ...

    def grow(
        self, batch: DraftBatch, plan: DraftPlan, roots: Roots, curves: tuple[Floats, Floats], terms: LevelTerms | None
    ) -> GrownTrees | None:
        """Draft all levels in one native call, or return None if unsupported.

        With `terms`, levels must be worthwhile (see PayingLevel). `curves` are from `AcceptanceModel.curves`.
        """
        return None

    def keep(self, batch: DraftBatch, expanded: Expanded, new_lengths: IntArray) -> bool:
        """Keep the draft KV of accepted nodes, if there is any. Return False if that is not supported."""
        return True

    def prefix_computed(self, row: int) -> None:
        """Mark a row's prompt as computed, for sequences that share it."""
        return None

    def forget(self, row: int) -> None:
        """Drop what is known of the row's sequence."""
        return None


class ModelDrafter:
    """Drafter that grows trees level by level with a draft model, while another level is worthwhile."""

    name = "model"

    def __init__(self, engine: DraftEngine) -> None:
        self.engine = engine
        self._last: Expanded | None = None

    def propose(self, batch: DraftBatch, plan: DraftPlan, acceptance: Acceptance, rule: LevelRule) -> Forest:
        active = np.flatnonzero(batch.room >= 2).astype(np.int32)  # with room for one token a tree gains nothing
        if not len(active):
            return empty_forest()
        tokens, scores = self._catch_up(batch, active, _num_candidates(plan))
        roots = Roots(sequence=active, tokens=tokens, scores=scores)
        grown = self._grow_at_once(batch, plan, roots, acceptance, rule)
        if grown is None:
            grown = grow(self.engine, batch, plan, roots, acceptance, rule)
        self._last = grown.expanded
        return grown.forest

    def observe(self, batch: DraftBatch, new_lengths: IntArray) -> None:
        last, self._last = self._last, None
        if last is not None and len(last.level_rows) and not self.engine.keep(batch, last, new_lengths):
            keep_drafted(batch, last, new_lengths, self.engine.slots, self.engine.cached)

    def _grow_at_once(
        self, batch: DraftBatch, plan: DraftPlan, roots: Roots, acceptance: Acceptance, rule: LevelRule
    ) -> GrownTrees | None:
        """Draft in one native call, or return None if unsupported or if `acceptance` or `rule` need Python."""
        if not (isinstance(acceptance, AcceptanceModel) and isinstance(rule, Always | PayingLevel)):
            return None
        terms = rule.terms if isinstance(rule, PayingLevel) else None
        grown = self.engine.grow(batch, plan, roots, acceptance.curves(self.name, batch.rows), terms)
        if grown is not None and isinstance(rule, PayingLevel):
            rule.level_rows = grown.expanded.level_rows.tolist()
        return grown

    def start(self, row: int, tokens: IntArray, group: str, history: tuple[tuple[int, ...], ...]) -> None: ...

    def forget(self, row: int) -> None:
        self.engine.forget(row)

    def reset(self) -> None:
        self._last = None

    def _catch_up(self, batch: DraftBatch, active: IntArray, num_candidates: int) -> tuple[IntArray, FloatArray]:
        slots, cached = self.engine.slots, self.engine.cached
        while True:
            rows_of = batch.rows[active]
            missing = batch.lengths[active] - cached[rows_of]
            taken = missing
            if int(missing.sum()) > max(_MAX_CATCH_UP_ROWS, 2 * len(active)):
                room = np.maximum(_MAX_CATCH_UP_ROWS - (np.cumsum(missing - 1) - (missing - 1)), 0)
                taken = np.minimum(missing - 1, room).astype(np.int32)  # all but the last token first
            complete = taken is missing
            counts = taken.astype(np.int64)
            member = np.repeat(np.arange(len(active)), counts)
            offset = np.arange(len(member)) - np.repeat(np.cumsum(counts) - counts, counts)
            positions = (cached[rows_of][member] + offset).astype(np.int32)
            table_rows = rows_of[member]
            last = np.cumsum(counts) - 1 if complete else np.empty(0, np.int64)
            rows = DraftRows(
                tokens=batch.tokens[table_rows, positions],
                positions=positions,
                slots=slots[table_rows, positions],
                table_rows=table_rows,
                context_lens=positions + np.int32(1),
                extra=np.empty((len(member), 0), np.int32),
                logit_rows=last.astype(np.int32),
                seeds=batch.seeds[active],
                noise_positions=(batch.lengths - batch.prompt_lengths)[active].astype(np.int32),
                temperatures=batch.temperatures[active],
            )
            result = self.engine.candidates(rows, num_candidates)
            cached[rows_of] += taken
            for row, count in zip(rows_of.tolist(), counts.tolist(), strict=True):
                if count > 2:  # a prompt, not the tokens of the last step
                    self.engine.prefix_computed(row)
            if complete:
                return result


def grow(
    engine: DraftEngine, batch: DraftBatch, plan: DraftPlan, roots: Roots, acceptance: Acceptance, rule: LevelRule
) -> GrownTrees:
    """Draft the trees level by level in Python, the reference for `DraftEngine.grow`."""
    tree = _Tree(batch, plan, acceptance, engine.slots, engine.capacity)
    tree.add_children(roots.sequence, np.full(len(roots.sequence), -1, np.int32), roots.tokens, roots.scores)
    for level in range(2, plan.depth + 1):
        frontier = tree.frontier(level, limit=plan.width * batch.size)
        worth = len(frontier) and rule.go_on(
            frontier_acceptance=tree.acceptance_of(frontier), num_rows=len(frontier), level=level
        )
        if not worth:
            break
        rows = tree.expand(frontier)
        tokens, scores = engine.candidates(rows, _num_candidates(plan))
        tree.add_children(tree.sequence_of(frontier), frontier, tokens, scores)
    return tree.grown()


def keep_drafted(
    batch: DraftBatch, expanded: Expanded, new_lengths: IntArray, slots: IntArray, cached: IntArray
) -> None:
    """Keep the draft KV of accepted nodes by swapping slot table entries, and update `cached`."""
    alive = np.empty(0, np.bool_)
    ends = np.cumsum(expanded.level_rows)
    for level, nodes in enumerate(np.split(expanded.nodes, ends[:-1], axis=1)):
        sequence, parent, token, held_at = nodes
        position = batch.lengths[sequence] + level
        parent_alive = np.ones(len(sequence), np.bool_) if level == 0 else alive[parent]
        rows = batch.rows[sequence]
        # the target has not run the last committed token either: it stays the next root
        known = position < new_lengths[sequence] - 1
        alive = parent_alive & known
        alive[alive] = batch.tokens[rows[alive], position[alive]] == token[alive]
        kept = np.flatnonzero(alive)
        if len(kept):
            row, at, held = rows[kept], position[kept], held_at[kept]
            slots[row, at], slots[row, held] = slots[row, held], slots[row, at]
            cached[row] = at + 1


class _Tree:
    def __init__(
        self, batch: DraftBatch, plan: DraftPlan, acceptance: Acceptance, slot_table: IntArray, capacity: IntArray
    ) -> None:
        self.batch = batch
        self.plan = plan
        self.acceptance = acceptance
        self.slot_table = slot_table
        self.capacity = capacity
        self.levels: list[dict[str, npt.NDArray[Any]]] = []
        self.starts: list[int] = [0]  # first node index of each level
        self.num_expanded = np.zeros(batch.size, np.int32)
        self.extra_of = np.empty((0, 0), np.int32)  # [frontier, level-1] slots of the expanded path
        self.expanded: list[tuple[IntArray, ...]] = []  # per level: the rows of Expanded.nodes
        self._frontier: IntArray = np.empty(0, np.int32)  # nodes expanded last

    def add_children(self, sequence: IntArray, parent: IntArray, tokens: IntArray, scores: FloatArray) -> None:
        """Add the next level: the best `plan.branch` of each parent's k candidates (tokens, scores [n, k]).

        A parent is a node's index in the level above, or -1 for a root.
        """
        n = len(tokens)
        finite = np.where(tokens >= 0, scores, _NO_CANDIDATE)  # fewer tokens than k, or NaN from the draft
        best = finite[:, :1]
        gap = np.minimum(best - finite, _LARGEST_GAP)
        gap[:, 0] = gap[:, 1]  # the lead of the best one
        k = self.plan.branch
        tokens, gap = tokens[:, :k], gap[:, :k]
        rank = np.broadcast_to(np.arange(k, dtype=np.int32), (n, k)).ravel()
        sequence_flat = np.repeat(sequence, k)
        depth = len(self.levels) + 1
        depth_flat = np.full(n * k, depth, np.int32)
        conditional = self.acceptance.predict(
            self.plan.drafter or "", self.batch.rows[sequence_flat], depth_flat, rank, gap.ravel()
        )
        above = np.repeat(self.acceptance_of(parent) if depth > 1 else np.ones(n, np.float32), k)
        level = {
            "sequence": sequence_flat,
            "parent": np.repeat(parent, k).astype(np.int32),
            "depth": depth_flat,
            "token": tokens.ravel(),
            "rank": rank,
            "gap": gap.ravel().astype(np.float32),
            "path_acceptance": (above * conditional).astype(np.float32),
        }
        keep = level["token"] >= 0  # padding of vocabularies smaller than k
        if not keep.all():
            level = {name: values[keep] for name, values in level.items()}
        self.levels.append(level)
        self.starts.append(self.starts[-1] + len(level["token"]))

    def acceptance_of(self, nodes: IntArray) -> FloatArray:
        return self.levels[-1]["path_acceptance"][nodes - self.starts[-2]]

    def sequence_of(self, nodes: IntArray) -> IntArray:
        return self.levels[-1]["sequence"][nodes - self.starts[-2]]

    def frontier(self, level: int, *, limit: int) -> IntArray:
        last = self.levels[-1]
        sequence = last["sequence"]
        free = self.capacity[self.batch.rows] - self.batch.lengths - self.num_expanded
        allowed = np.flatnonzero((self.batch.room[sequence] > level) & (free[sequence] > 0))
        if len(allowed) > limit:
            allowed = allowed[best_nodes(last["path_acceptance"][allowed], limit)]
        if len(allowed):  # never more of one sequence than its free slots
            order = _index_within(sequence[allowed], self.batch.size)
            allowed = allowed[order < free[sequence[allowed]]]
        return (allowed + self.starts[-2]).astype(np.int32)

    def expand(self, frontier: IntArray) -> DraftRows:
        batch, last = self.batch, self.levels[-1]
        inside = frontier - self.starts[-2]
        sequence: IntArray = last["sequence"][inside]
        parent = last["parent"][inside]
        rows = batch.rows[sequence]
        held_at = (batch.lengths[sequence] + self.num_expanded[sequence] + _index_within(sequence, batch.size)).astype(
            np.int32
        )
        slots = self.slot_table[rows, held_at]
        if len(self.levels) == 1:
            parent_in_level = np.full(len(frontier), -1, np.int64)
            extra = slots[:, None]
        else:
            parent_in_level = np.searchsorted(self._frontier, parent)
            extra = np.concatenate((self.extra_of[parent_in_level], slots[:, None]), axis=1)
        self.num_expanded += np.bincount(sequence, minlength=batch.size).astype(np.int32)
        tokens: IntArray = last["token"][inside]
        self.expanded.append((sequence, parent_in_level.astype(np.int32), tokens, held_at))
        self._frontier, self.extra_of = frontier, extra
        depth = len(self.levels)
        return DraftRows(
            tokens=tokens,
            positions=(batch.lengths[sequence] + depth - 1).astype(np.int32),
            slots=slots,
            table_rows=rows,
            context_lens=batch.lengths[sequence],
            extra=np.ascontiguousarray(extra),
            logit_rows=np.arange(len(frontier), dtype=np.int32),
            seeds=batch.seeds[sequence],
            noise_positions=(batch.lengths[sequence] - batch.prompt_lengths[sequence] + depth).astype(np.int32),
            temperatures=batch.temperatures[sequence],
        )

    def grown(self) -> GrownTrees:
        names = ("sequence", "parent", "depth", "token", "rank", "gap", "path_acceptance")
        forest = Forest(**{name: np.concatenate([level[name] for level in self.levels]) for name in names})
        level_rows = np.array([len(level[0]) for level in self.expanded], np.int64)
        levels = [np.stack(level) for level in self.expanded]
        nodes = np.concatenate(levels, axis=1) if levels else np.empty((4, 0), np.int32)
        return GrownTrees(forest, Expanded(nodes, level_rows))


def _num_candidates(plan: DraftPlan) -> int:
    """Return the number of candidates per node: at least 2, for the best one's lead."""
    return max(plan.branch, 2)


def _index_within(sequence: npt.NDArray[np.generic], num_sequences: int) -> IntArray:
    """Return each element's index among equal values of a sorted array.

    >>> _index_within(np.array([0, 0, 2, 2, 2]), 3).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = np.searchsorted(sequence, np.arange(num_sequences))
    index: IntArray = (np.arange(len(sequence)) - starts[sequence]).astype(np.int32)
    return index
