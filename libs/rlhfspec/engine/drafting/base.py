"""Interfaces of drafting. A step: plan -> propose (drafter) -> budget (selector) -> verify (engine) -> observe."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rlhfspec.common.arrays import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """Plan of one step's draft."""

    drafter: str | None  # None: plain decoding
    depth: int = 0
    width: int = 1  # nodes expanded per sequence and level, on average
    branch: int = 1  # children kept per expanded node
    max_nodes: int | None = None  # nodes verified per sequence, on average
    num_sequences: int | None = field(default=None, compare=False)  # draft only for the first ones of the batch

    @property
    def name(self) -> str:
        """Return the name used in statistics.

        >>> DraftPlan(drafter="model", depth=4, width=2, branch=3).name
        'model-d4-w2-b3'
        """
        if self.drafter is None:
            return "plain"
        cap = "" if self.max_nodes is None else f"-n{self.max_nodes}"
        return f"{self.drafter}-d{self.depth}-w{self.width}-b{self.branch}{cap}"


PLAIN = DraftPlan(drafter=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftBatch:
    """Batch of B sequences to draft for. The next token's response position is `length - prompt_length`."""

    rows: IntArray  # [B] row in the engine's tables
    lengths: IntArray  # [B] tokens so far
    prompt_lengths: IntArray  # [B]
    room: IntArray  # [B] tokens that may still be generated; bounds the depth of trees
    seeds: npt.NDArray[np.uint64]  # [B]
    temperatures: FloatArray  # [B]
    tokens: IntArray  # [R, L] prompts and responses so far, read only
    weights_version: int = 0

    @property
    def size(self) -> int:
        return len(self.rows)

    def first(self, num_sequences: int | None) -> DraftBatch:
        if num_sequences is None:
            return self
        part = slice(num_sequences)
        return replace(
            self, rows=self.rows[part], lengths=self.lengths[part], prompt_lengths=self.prompt_lengths[part],
            room=self.room[part], seeds=self.seeds[part], temperatures=self.temperatures[part],
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """Trees of all sequences as flat arrays of M nodes, parents first. `path_acceptance` never grows downwards."""

    sequence: IntArray  # [M] index into the DraftBatch
    parent: IntArray  # [M] index of the parent node, -1 = the sequence's last token
    depth: IntArray  # [M] 1 = directly below the root
    token: IntArray  # [M]
    rank: IntArray  # [M] 0 = the parent's best candidate under the noise
    gap: FloatArray  # [M] perturbed-score gap: for rank 0, best minus second best; for rank r, best minus its own
    path_acceptance: FloatArray  # [M] predicted probability that the whole path is accepted

    @property
    def size(self) -> int:
        return len(self.token)

    def take(self, keep: IntArray) -> Forest:
        new_index = np.full(self.size + 1, -1, dtype=np.int32)  # the last entry maps -1 to -1
        new_index[keep] = np.arange(len(keep), dtype=np.int32)
        return Forest(
            sequence=self.sequence[keep],
            parent=new_index[self.parent[keep]],
            depth=self.depth[keep],
            token=self.token[keep],
            rank=self.rank[keep],
            gap=self.gap[keep],
            path_acceptance=self.path_acceptance[keep],
        )


def empty_forest() -> Forest:
    none_int, none_float = np.empty(0, np.int32), np.empty(0, np.float32)
    return Forest(
        sequence=none_int,
        parent=none_int,
        depth=none_int,
        token=none_int,
        rank=none_int,
        gap=none_float,
        path_acceptance=none_float,
    )


class Acceptance(Protocol):
    def predict(self, drafter: str, rows: IntArray, depth: IntArray, rank: IntArray, gap: FloatArray) -> FloatArray:
        """Return each node's acceptance probability [M], given that its parent was accepted."""
        ...


class LevelRule(Protocol):
    def go_on(self, *, frontier_acceptance: FloatArray, num_rows: int, level: int) -> bool:
        """Return whether to draft level `level` (>= 2) by expanding nodes with this `path_acceptance`."""
        ...


class Drafter(Protocol):
    """Proposer of trees, which affect speed but never tokens."""

    name: str

    def propose(self, batch: DraftBatch, plan: DraftPlan, acceptance: Acceptance, rule: LevelRule) -> Forest:
        """Return trees for the batch, at most `plan.depth` deep and never deeper than a sequence's `room`."""
        ...

    def observe(self, batch: DraftBatch, new_lengths: IntArray) -> None:
        """Learn after a commit: sequence i now has `new_lengths[i]` tokens in `batch.tokens[rows[i]]`."""
        ...

    def start(self, row: int, tokens: IntArray, group: str, history: tuple[tuple[int, ...], ...]) -> None:
        """Start a sequence with `tokens` in table row `row`; `history`: earlier rollouts of its prompt."""
        ...

    def forget(self, row: int) -> None:
        """Drop the state of the row's sequence."""
        ...

    def reset(self) -> None:
        """Drop everything that depends on the old weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    rows: IntArray  # [B] table rows of decoding sequences
    room: IntArray  # [B]
    num_prefill_rows: int  # rows of prompt chunks in the same forward
    kv_tokens: int  # context tokens that attention reads, once per sequence: tree nodes share the loads
    unseen: IntArray  # [B] tokens that the draft model has yet to run, except the last of each sequence
    most_nodes: int | None = None  # to verify, for the time per token of clients


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftChoice:
    keep: IntArray  # [N] ascending node indices
    predicted_accepted: float  # expected accepted nodes in total
    predicted_verify_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutcome:
    plan: DraftPlan
    state: BatchState
    forest: Forest  # the verified nodes
    reached: BoolArray  # [N] the node's parent was accepted, so the node itself was tested
    accepted: BoolArray  # [N]
    num_committed: int  # tokens appended to all decoding sequences
    num_proposed: int  # nodes drafted, before the budget
    draft_seconds: float
    verify_seconds: float
    step_seconds: float
    choice: DraftChoice | None = field(default=None)


class Selector(Protocol):
    def plan(self, state: BatchState) -> DraftPlan: ...

    def rule(self, plan: DraftPlan, state: BatchState) -> LevelRule: ...

    def budget(self, plan: DraftPlan, state: BatchState, forest: Forest, draft_seconds: float) -> DraftChoice: ...

    def observe(self, outcome: DraftOutcome) -> None: ...

    def reset(self) -> None: ...
