"""Drafting with a smaller model of the same vocabulary.

The draft lives in the target's paged cache: the same blocks, its own KV tensor, and its own permutation of the
slots, because it expands other nodes than the target verifies. It is caught up lazily: `cached[row]` counts the
positions whose draft KV is valid, and every proposal first runs what is missing (usually the one or two tokens the
last verification added, so a full acceptance leaves no gap).

Under the law the drafter adds the target's own noise to its log-probabilities: its best candidates are likely winners.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rlhfspec.drafting.base import (
    Acceptance,
    DraftBatch,
    FloatArray,
    Forest,
    IntArray,
    LevelRule,
    Plan,
    empty_forest,
)

_LARGEST_GAP = 30.0
_NO_CANDIDATE = np.float32(-1e30)
_MAX_CATCH_UP_ROWS = 512  # one forward; longer gaps take several


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Query rows of one draft forward; see rlhfspec.kernels.tree_attention.AttentionMeta for the fields."""

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


class DraftEngine(Protocol):
    """What the drafter needs of the engine: a forward in its own namespace, and the slots of a row."""

    def candidates(self, rows: Rows, slot_table: IntArray, k: int) -> tuple[IntArray, FloatArray]:
        """Run the rows; best k tokens and perturbed scores of the wanted ones, [n, k] each."""
        ...

    def draft_slots(self) -> IntArray:
        """[R, L] the draft namespace's slot table (a permutation of what each row owns)."""
        ...

    def draft_capacity(self) -> IntArray:
        """[R] slots each row owns."""
        ...

    def reusable_prefix(self, row: int) -> int:
        """Leading positions of the row whose draft KV a sibling already computed in shared blocks."""
        ...

    def prefix_computed(self, row: int, length: int) -> None:
        """The first `length` positions of the row now have draft KV."""
        ...


@dataclass(slots=True)
class _Expanded:
    """The nodes run through the draft in the last proposal, for keeping the KV of those that came true."""

    rows: IntArray  # [B] of the batch
    lengths: IntArray  # [B] tokens before the proposal
    sequence: list[IntArray]  # per level
    parent: list[IntArray]  # per level: index into the previous level, -1 = root
    token: list[IntArray]
    held_at: list[IntArray]  # per level: index into the row's draft slot table


class ModelDrafter:
    """Proposes trees level by level: expand the best frontier, keep `branch` candidates of each, go on if it pays."""

    name = "model"

    def __init__(self, engine: DraftEngine, num_rows: int) -> None:
        self.engine = engine
        self.cached = np.zeros(num_rows, np.int32)  # positions with valid draft KV
        self._last: _Expanded | None = None

    def propose(self, batch: DraftBatch, plan: Plan, acceptance: Acceptance, rule: LevelRule) -> Forest:
        active = np.flatnonzero(batch.room >= 2).astype(np.int32)  # with room for one token a tree gains nothing
        if not len(active):
            return empty_forest()
        tree = _Tree(batch, plan, acceptance, self.engine.draft_slots(), self.engine.draft_capacity())
        tokens, scores = self._catch_up(batch, active, _num_candidates(plan))
        tree.add_children(active, np.full(len(active), -1, np.int32), tokens, scores)
        for level in range(2, plan.depth + 1):
            frontier = tree.frontier(level, limit=plan.width * batch.size)
            worth = len(frontier) and rule.go_on(
                frontier_acceptance=tree.acceptance_of(frontier), num_rows=len(frontier), level=level
            )
            if not worth:
                break
            rows = tree.expand(frontier)
            tokens, scores = self.engine.candidates(rows, self.engine.draft_slots(), _num_candidates(plan))
            tree.add_children(tree.sequence_of(frontier), frontier, tokens, scores)
        self._last = tree.expanded
        return tree.forest()

    def observe(self, batch: DraftBatch, new_lengths: IntArray) -> None:
        """Keep the draft KV of expanded nodes that the target chose, by swapping slot table entries."""
        last, self._last = self._last, None
        if last is None:
            return
        slots = self.engine.draft_slots()
        alive = np.empty(0, np.bool_)
        for level in range(len(last.sequence)):
            sequence, parent = last.sequence[level], last.parent[level]
            position = last.lengths[sequence] + level
            parent_alive = np.ones(len(sequence), np.bool_) if level == 0 else alive[parent]
            rows = last.rows[sequence]
            # the last committed token was not run by the target either: it stays the next root
            known = position < new_lengths[sequence] - 1
            alive = parent_alive & known
            alive[alive] = batch.tokens[rows[alive], position[alive]] == last.token[level][alive]
            kept = np.flatnonzero(alive)
            if len(kept):
                row, at, held = rows[kept], position[kept], last.held_at[level][kept]
                slots[row, at], slots[row, held] = slots[row, held], slots[row, at]
                self.cached[row] = at + 1

    def start(self, row: int, tokens: IntArray, group: str, history: tuple[tuple[int, ...], ...]) -> None:
        self.cached[row] = self.engine.reusable_prefix(row)

    def forget(self, row: int) -> None:
        self.cached[row] = 0

    def reset(self) -> None:
        self.cached[:] = 0
        self._last = None

    def _catch_up(self, batch: DraftBatch, active: IntArray, num_candidates: int) -> tuple[IntArray, FloatArray]:
        """Run every token the draft has not seen; the last token of each sequence gives its first candidates."""
        while True:
            rows_of = batch.rows[active]
            missing = batch.lengths[active] - self.cached[rows_of]
            taken = missing
            if int(missing.sum()) > max(_MAX_CATCH_UP_ROWS, 2 * len(active)):
                room = np.maximum(_MAX_CATCH_UP_ROWS - (np.cumsum(missing - 1) - (missing - 1)), 0)
                taken = np.minimum(missing - 1, room).astype(np.int32)  # everything but the last token first
            complete = taken is missing
            counts = taken.astype(np.int64)
            member = np.repeat(np.arange(len(active)), counts)
            offset = np.arange(len(member)) - np.repeat(np.cumsum(counts) - counts, counts)
            positions = (self.cached[rows_of][member] + offset).astype(np.int32)
            table_rows = rows_of[member]
            slots = self.engine.draft_slots()
            last = np.cumsum(counts) - 1 if complete else np.empty(0, np.int64)
            rows = Rows(
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
            result = self.engine.candidates(rows, slots, num_candidates)
            self.cached[rows_of] += taken
            for row, count in zip(rows_of.tolist(), counts.tolist(), strict=True):
                if count > 2:  # a prompt, not the tokens of the last step
                    self.engine.prefix_computed(row, int(self.cached[row]))
            if complete:
                return result


class _Tree:
    """A forest under construction: flat arrays per level, and the slots of what was expanded."""

    def __init__(
        self, batch: DraftBatch, plan: Plan, acceptance: Acceptance, slot_table: IntArray, capacity: IntArray
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
        self.expanded = _Expanded(batch.rows, batch.lengths, [], [], [], [])
        self._frontier: IntArray = np.empty(0, np.int32)  # nodes expanded last

    def add_children(self, sequence: IntArray, parent: IntArray, tokens: IntArray, scores: FloatArray) -> None:
        """tokens/scores [n, k]: candidates of n parents (node indices of the level above, -1 = root); `branch` stay."""
        n = len(tokens)
        finite = np.where(tokens >= 0, scores, _NO_CANDIDATE)  # fewer tokens than k, or a draft gone NaN
        best = finite[:, :1]
        gap = np.minimum(best - finite, _LARGEST_GAP)
        gap[:, 0] = gap[:, 1]  # the best one's lead
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
        """The most promising nodes of the last level that have room below and a free slot, at most `limit`."""
        last = self.levels[-1]
        sequence = last["sequence"]
        free = self.capacity[self.batch.rows] - self.batch.lengths - self.num_expanded
        allowed = np.flatnonzero((self.batch.room[sequence] > level) & (free[sequence] > 0))
        if len(allowed) > limit:
            best = np.argpartition(np.negative(last["path_acceptance"][allowed]), limit - 1)[:limit]
            allowed = np.sort(allowed[best])
        if len(allowed):  # never more of one sequence than it has free slots
            order = _index_within(sequence[allowed], self.batch.size)
            allowed = allowed[order < free[sequence[allowed]]]
        return (allowed + self.starts[-2]).astype(np.int32)

    def expand(self, frontier: IntArray) -> Rows:
        """Give each frontier node a free slot and describe its row for the draft forward."""
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
        self.expanded.sequence.append(sequence)
        self.expanded.parent.append(parent_in_level.astype(np.int32))
        self.expanded.token.append(last["token"][inside])
        self.expanded.held_at.append(held_at)
        self._frontier, self.extra_of = frontier, extra
        depth = len(self.levels)
        return Rows(
            tokens=self.expanded.token[-1],
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

    def forest(self) -> Forest:
        names = ("sequence", "parent", "depth", "token", "rank", "gap", "path_acceptance")
        return Forest(**{name: np.concatenate([level[name] for level in self.levels]) for name in names})


def _num_candidates(plan: Plan) -> int:
    """One more than a chain keeps: how far the best leads the second is what acceptance is predicted from."""
    return max(plan.branch, 2)


def _index_within(sequence: npt.NDArray[np.generic], num_sequences: int) -> IntArray:
    """0, 1, 2, ... among equal values of a sorted array.

    >>> _index_within(np.array([0, 0, 2, 2, 2]), 3).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = np.searchsorted(sequence, np.arange(num_sequences))
    index: IntArray = (np.arange(len(sequence)) - starts[sequence]).astype(np.int32)
    return index
