"""Drafting without a model: tokens that followed the same context in the prompt group or in earlier rollouts."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np

from rlhfspec.common.arrays import IntArray
from rlhfspec.engine.drafting.base import Acceptance, DraftBatch, DraftPlan, Forest, LevelRule, empty_forest
from rlhfspec.engine.drafting.contexts import LONGEST, ContextIndex
from rlhfspec.engine.drafting.noise import gumbels

_MOST_GAP = 30.0
_LEAST_PATH = 0.02  # less likely paths are not expanded
_MOST_BRANCH = 4
_TOKENS_INDEXED_PER_STEP = 768  # a backlog (after steps without this drafter) is indexed gradually
_MOST_WAITING_TEXTS = 64  # per group: texts of finished members and earlier rollouts not yet indexed
_STEPS_REMEMBERED = 4  # steps after which a node's children are recomputed, because siblings have written more
_MOST_REMEMBERED = 256  # nodes per sequence

_GroupKey = str | bytes
_Child = tuple[int, float, float]  # token, gap, rough chance given its parent
_Node = tuple[int, int, tuple[int, ...], float]
"""(index in the forest, -1 for a root; sequence in the batch; last tokens up to the node; rough chance of its path)"""


@dataclass(slots=True)
class _Group:
    """Context index shared by the samples of one prompt. Some groups without samples are kept."""

    key: _GroupKey
    index: ContextIndex
    first_text: IntArray  # initial tokens of the first member: its prompt, counted once
    num_members: int = 0
    waiting: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # (tokens, where counting starts)


@dataclass(slots=True)
class _SuffixSequence:
    group: _Group
    length: int  # tokens in the table
    num_indexed: int
    # By context: (response position, last step it serves, children). Children below an accepted token are reused in the
    # next proposal, since a position's noise never changes.
    remembered: dict[tuple[int, ...], tuple[int, int, list[_Child]]] = field(default_factory=dict)


@dataclass(slots=True)
class _Wanted:
    sequence: _SuffixSequence
    depth: int  # levels that may be drafted
    seed: int
    position: int  # response position of the first level
    is_random: bool  # temperature > 0


class SuffixDrafter:
    """Drafter that looks up the last tokens, expanding the `plan.width * B` likeliest nodes of each level."""

    name = "suffix"

    def __init__(self, *, max_contexts: int = 1 << 17, max_idle_groups: int = 16) -> None:
        self._max_contexts = max_contexts
        self._max_idle_groups = max_idle_groups
        self._groups: dict[_GroupKey, _Group] = {}
        self._idle: OrderedDict[_GroupKey, None] = OrderedDict()
        self._sequences: dict[int, _SuffixSequence] = {}
        self._tokens: IntArray | None = None  # the engine's table, as last seen
        self._step = 0

    def start(self, row: int, tokens: IntArray, group: str, history: tuple[tuple[int, ...], ...]) -> None:
        self.forget(row)
        key: _GroupKey = group or tokens.tobytes()
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = _Group(key, ContextIndex(self._max_contexts), tokens.copy())
            found.waiting += [(text, 0) for text in history[-_MOST_WAITING_TEXTS:]]
            num_indexed = 0
        else:
            num_indexed = _common_prefix(found.first_text, tokens)
        self._idle.pop(key, None)
        found.num_members += 1
        self._sequences[row] = _SuffixSequence(found, len(tokens), num_indexed)

    def forget(self, row: int) -> None:
        sequence = self._sequences.pop(row, None)
        if sequence is None:
            return
        group = sequence.group
        if self._tokens is not None and sequence.num_indexed < sequence.length:
            first = max(sequence.num_indexed - LONGEST, 0)
            text = tuple(self._tokens[row, first : sequence.length].tolist())
            group.waiting.append((text, sequence.num_indexed - first))
            del group.waiting[:-_MOST_WAITING_TEXTS]
        group.num_members -= 1
        if group.num_members == 0:
            self._idle[group.key] = None
            while len(self._idle) > self._max_idle_groups:
                oldest, _ = self._idle.popitem(last=False)
                del self._groups[oldest]

    def observe(self, batch: DraftBatch, new_lengths: IntArray) -> None:
        self._tokens = batch.tokens
        for row, length in zip(batch.rows.tolist(), new_lengths.tolist(), strict=True):
            self._sequences[row].length = length

    def reset(self) -> None:
        """Keep the index, because text generated with older weights still predicts well."""

    def clear(self) -> None:
        for key in self._idle:
            del self._groups[key]
        self._idle.clear()

    def propose(self, batch: DraftBatch, plan: DraftPlan, acceptance: Acceptance, rule: LevelRule) -> Forest:
        """Propose trees without consulting `rule`, because a level costs microseconds."""
        self._step += 1
        self._index_new(batch)
        wanted, frontier = self._roots(batch, plan.depth)
        draft = _Draft(wanted, self._step, min(plan.branch, _MOST_BRANCH))
        for level in range(1, plan.depth + 1):
            frontier = draft.expand(frontier, level)
            if len(frontier) > plan.width * batch.size:
                frontier = sorted(frontier, key=itemgetter(3), reverse=True)[: plan.width * batch.size]
                frontier.sort(key=itemgetter(0))
            if not frontier:
                break
        return draft.forest(batch, acceptance)

    def _roots(self, batch: DraftBatch, depth: int) -> tuple[list[_Wanted], list[_Node]]:
        first = np.maximum(batch.lengths - LONGEST, 0)
        columns = np.minimum(first[:, None] + np.arange(LONGEST), batch.lengths[:, None] - 1)
        contexts = batch.tokens[batch.rows[:, None], columns].tolist()  # [B, LONGEST]
        of_each = (batch.rows, batch.lengths, batch.room, batch.seeds, batch.lengths - batch.prompt_lengths)
        is_random = (batch.temperatures > 0).tolist()
        wanted: list[_Wanted] = []
        roots: list[_Node] = []
        for i, (row, length, room, seed, position) in enumerate(zip(*(a.tolist() for a in of_each), strict=True)):
            sequence = self._sequences[row]
            if len(sequence.remembered) > _MOST_REMEMBERED:
                sequence.remembered.clear()
            wanted.append(_Wanted(sequence, min(depth, room - 1), seed, position, is_random[i]))
            if room >= 2:
                roots.append((-1, i, tuple(contexts[i][:length]), 1.0))
        return wanted, roots

    def _index_new(self, batch: DraftBatch) -> None:
        left = _TOKENS_INDEXED_PER_STEP
        groups: dict[int, _Group] = {}
        for row, length in zip(batch.rows.tolist(), batch.lengths.tolist(), strict=True):
            sequence = self._sequences[row]
            sequence.length = length
            if sequence.group.waiting:
                groups[id(sequence.group)] = sequence.group
            start, end = sequence.num_indexed, min(length, sequence.num_indexed + left)
            if start >= end:
                continue
            first = max(start - LONGEST, 0)
            sequence.group.index.add(tuple(batch.tokens[row, first:end].tolist()), start=start - first)
            sequence.num_indexed = end
            left -= end - start
        for group in groups.values():
            while group.waiting and left > 0:
                text, start = group.waiting.pop(0)
                end = min(len(text), start + left)
                group.index.add(text[:end], start=start)
                left -= end - start
                if end < len(text):
                    group.waiting.insert(0, (text, end))


class _Draft:
    def __init__(self, wanted: list[_Wanted], step: int, branch: int) -> None:
        self._wanted = wanted
        self._step = step
        self._branch = branch
        self._sequence: list[int] = []
        self._parent: list[int] = []
        self._depth: list[int] = []
        self._token: list[int] = []
        self._rank: list[int] = []
        self._gap: list[float] = []

    def expand(self, frontier: list[_Node], level: int) -> list[_Node]:
        self._find_children(frontier, level)
        branch = self._branch
        next_frontier: list[_Node] = []
        for index, i, context, path in frontier:
            wanted = self._wanted[i]
            _, _, children = wanted.sequence.remembered[context]
            goes_on = level < wanted.depth
            for rank, (token, gap, chance) in enumerate(children if len(children) <= branch else children[:branch]):
                if goes_on and path * chance >= _LEAST_PATH:
                    below = (*context[1 - LONGEST :], token)
                    next_frontier.append((len(self._token), i, below, path * chance))
                self._sequence.append(i)
                self._parent.append(index)
                self._depth.append(level)
                self._token.append(token)
                self._rank.append(rank)
                self._gap.append(gap)
        return next_frontier

    def _find_children(self, frontier: list[_Node], level: int) -> None:
        """Find the children of all frontier nodes, drawing new noise in one call."""
        new = []
        seeds: list[int] = []
        positions: list[int] = []
        candidates: list[int] = []
        for _, i, context, _ in frontier:
            wanted = self._wanted[i]
            position = wanted.position + level - 1
            known = wanted.sequence.remembered.get(context)
            if known is not None and known[0] == position and known[1] >= self._step:
                continue
            tokens, log_chances, log_rest = wanted.sequence.group.index.continuations(context)
            new.append((wanted, context, position, tokens, log_chances, log_rest))
            if wanted.is_random:
                seeds += [wanted.seed] * len(tokens)
                positions += [position] * len(tokens)
                candidates += tokens
        noise = iter(gumbels(seeds, positions, candidates))
        for wanted, context, position, tokens, log_chances, log_rest in new:
            scores = [log_chance + next(noise) for log_chance in log_chances] if wanted.is_random else log_chances
            last_step = self._step + _STEPS_REMEMBERED - 1 if tokens else self._step
            wanted.sequence.remembered[context] = position, last_step, _children(tokens, scores, log_rest)

    def forest(self, batch: DraftBatch, acceptance: Acceptance) -> Forest:
        if not self._token:
            return empty_forest()
        sequence = np.array(self._sequence, np.int32)
        depth, rank = np.array(self._depth, np.int32), np.array(self._rank, np.int32)
        gap = np.array(self._gap, np.float32)
        path = acceptance.predict("suffix", batch.rows[sequence], depth, rank, gap).tolist()
        for node, parent in enumerate(self._parent):
            if parent >= 0:
                path[node] *= path[parent]
        return Forest(
            sequence=sequence,
            parent=np.array(self._parent, np.int32),
            depth=depth,
            token=np.array(self._token, np.int32),
            rank=rank,
            gap=gap,
            path_acceptance=np.array(path, np.float32),
        )


def _children(tokens: tuple[int, ...], scores: Sequence[float], log_rest: float) -> list[_Child]:
    """Return the best candidates as (token, gap, chance). Unseen tokens (`log_rest`) compete for the best one's gap.

    >>> [(token, round(gap, 2)) for token, gap, _ in _children((5, 6), (-2.0, -0.5), -1.5)]
    [(6, 1.0), (5, 1.5)]
    """
    if not tokens:
        return []
    if len(tokens) == 1:
        return [_best(tokens[0], scores[0] - log_rest)]
    ranked = sorted(zip(scores, tokens, strict=True), reverse=True)[:_MOST_BRANCH]
    best = ranked[0][0]
    children = [_best(ranked[0][1], best - max(ranked[1][0], log_rest))]
    for score, token in ranked[1:]:
        gap = min(best - score, _MOST_GAP)
        children.append((token, gap, 0.3 * math.exp(-gap)))
    return children


def _best(token: int, lead: float) -> _Child:
    gap = min(max(lead, 0.0), _MOST_GAP)
    return token, gap, 1.0 - 0.5 * math.exp(-gap)


def _common_prefix(left: IntArray, right: IntArray) -> int:
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size
