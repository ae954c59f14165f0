"""Drafting without a model: what followed the longest matching suffix before.

It looks in the sequence's own text, in its siblings of the prompt group (running or finished here) and in earlier
rollouts of the prompt. Under the law it knows the noise that the target will add, so among the continuations it has
seen it ranks by log-chance plus noise, and even a single continuation tells by its noise how safe it is.

Example:
    >>> from rlhfspec.drafting.acceptance import AcceptanceModel
    >>> table = np.zeros((1, 32), np.int32)
    >>> table[0, :14] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4, 5]
    >>> drafter = SuffixDrafter()
    >>> drafter.start(0, table[0, :14], "", ())
    >>> of_one = lambda value, kind=np.int32: np.array([value], kind)
    >>> batch = DraftBatch(
    ...     rows=of_one(0), lengths=of_one(14), prompt_lengths=of_one(14), room=of_one(9), seeds=of_one(1, np.uint64),
    ...     temperatures=of_one(0, np.float32), tokens=table,
    ... )
    >>> drafter.propose(batch, Plan(drafter="suffix", depth=4), AcceptanceModel(), rule=None).token.tolist()
    [6, 7, 8, 9]
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter

import numpy as np

from rlhfspec.drafting.base import Acceptance, DraftBatch, Forest, IntArray, LevelRule, Plan, empty_forest
from rlhfspec.drafting.contexts import LONGEST, ContextIndex
from rlhfspec.drafting.noise import gumbels

_MOST_GAP = 30.0
_LEAST_PATH = 0.02  # paths less likely than this are not worth a look
_TOKENS_INDEXED_PER_STEP = 768  # a backlog (after steps without this drafter) is worked off bit by bit
_MOST_WAITING_TEXTS = 64  # of a group: texts of finished members and earlier rollouts not yet indexed

_GroupKey = str | bytes


@dataclass(slots=True)
class _Group:
    """Samples of one prompt share one index. It outlives its members a while, for those that come late."""

    key: _GroupKey
    index: ContextIndex
    first_text: IntArray  # what the first member started with: its prompt, counted once for all
    num_members: int = 0
    waiting: list[tuple[tuple[int, ...], int]] = field(default_factory=list)  # (tokens, where counting starts)


@dataclass(slots=True)
class _Sequence:
    group: _Group
    length: int  # tokens known to exist in the table
    num_indexed: int


@dataclass(slots=True)
class _Node:
    """A node under construction; the root has token -1."""

    index: int  # in the forest, -1 = root
    sequence: int  # in the batch
    context: tuple[int, ...]  # the last tokens up to and with this node
    path: float  # rough chance of the whole path, before calibration
    texts: ContextIndex
    room: int  # levels that may lie below
    seed: int
    position: int  # response position of the next token
    is_random: bool  # temperature > 0


class SuffixDrafter:
    """Implements rlhfspec.drafting.base.Drafter.

    A level expands the `plan.width * B` likeliest nodes of the level above and keeps `plan.branch` children of each.
    `max_contexts` bounds one group's index, `max_idle_groups` the groups kept after their last member left.
    """

    name = "suffix"

    def __init__(self, *, max_contexts: int = 1 << 17, max_idle_groups: int = 16) -> None:
        self._max_contexts = max_contexts
        self._max_idle_groups = max_idle_groups
        self._groups: dict[_GroupKey, _Group] = {}
        self._idle: OrderedDict[_GroupKey, None] = OrderedDict()
        self._sequences: dict[int, _Sequence] = {}
        self._tokens: IntArray | None = None  # the engine's table, as last seen

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
        self._sequences[row] = _Sequence(found, len(tokens), num_indexed)

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
        """Nothing here depends on the weights: older text is a guess as good as any, and calibration follows."""

    def propose(self, batch: DraftBatch, plan: Plan, acceptance: Acceptance, rule: LevelRule) -> Forest:
        """`rule` is not asked: a level costs microseconds, and the budget prunes."""
        self._index_new(batch)
        draft = _Draft(plan.branch)
        frontier = self._roots(batch)
        for level in range(1, plan.depth + 1):
            frontier = draft.expand(frontier, level, last=level == plan.depth)
            if len(frontier) > plan.width * batch.size:
                frontier = sorted(frontier, key=attrgetter("path"), reverse=True)[: plan.width * batch.size]
                frontier.sort(key=attrgetter("index"))
            if not frontier:
                break
        return draft.forest(batch, acceptance)

    def num_contexts(self) -> int:
        """Entries of all indexes: what memory grows with."""
        return sum(len(group.index) for group in self._groups.values())

    def _roots(self, batch: DraftBatch) -> list[_Node]:
        """Sequences with room for more than one token, with the last tokens of each."""
        first = np.maximum(batch.lengths - LONGEST, 0)
        columns = np.minimum(first[:, None] + np.arange(LONGEST), batch.lengths[:, None] - 1)
        contexts = batch.tokens[batch.rows[:, None], columns].tolist()  # [B, LONGEST]
        lengths, seeds = batch.lengths.tolist(), batch.seeds.tolist()
        positions = (batch.lengths - batch.prompt_lengths).tolist()
        is_random = (batch.temperatures > 0).tolist()
        return [
            _Node(
                -1,
                i,
                tuple(contexts[i][: lengths[i]]),
                1.0,
                self._sequences[row].group.index,
                room - 1,
                seeds[i],
                positions[i],
                is_random[i],
            )
            for i, (row, room) in enumerate(zip(batch.rows.tolist(), batch.room.tolist(), strict=True))
            if room >= 2
        ]

    def _index_new(self, batch: DraftBatch) -> None:
        """Count new tokens of the batch, then texts that wait, up to this step's share."""
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
    """A forest under construction, level by level over the whole batch."""

    def __init__(self, branch: int) -> None:
        self._branch = branch
        self._sequence: list[int] = []
        self._parent: list[int] = []
        self._depth: list[int] = []
        self._token: list[int] = []
        self._rank: list[int] = []
        self._gap: list[float] = []
        self._alone: list[tuple[int, int, int, int]] = []  # (forest index, seed, position, token): noise still to add

    def expand(self, frontier: list[_Node], level: int, *, last: bool) -> list[_Node]:
        """Children of the frontier; returns those worth expanding in turn."""
        found = [(node, *node.texts.continuations(node.context)) for node in frontier]
        torn = [entry for entry in found if len(entry[1]) > 1 and entry[0].is_random]
        noise = iter(_noise_of(torn))
        children: list[_Node] = []
        for node, tokens, chances, rest in found:
            if not tokens:
                continue
            scores = [math.log(chance) for chance in chances]
            if len(tokens) == 1:
                if node.is_random:
                    self._alone.append((len(self._token), node.seed, node.position, tokens[0]))
                ranked = [0]
            else:
                if node.is_random:
                    scores = [score + next(noise) for score in scores]
                ranked = sorted(range(len(tokens)), key=scores.__getitem__, reverse=True)
            best = scores[ranked[0]]
            behind = max(scores[ranked[1]], math.log(rest)) if len(ranked) > 1 else math.log(rest)
            for rank, at in enumerate(ranked[: self._branch]):
                gap = best - behind if rank == 0 else best - scores[at]
                gap = min(max(gap, 0.0), _MOST_GAP)
                path = node.path * (1.0 - 0.5 * math.exp(-gap) if rank == 0 else 0.3 * math.exp(-gap))
                token = tokens[at]
                if not last and node.room > 1 and path >= _LEAST_PATH:
                    context = (*node.context[1 - LONGEST :], token)
                    children.append(
                        _Node(
                            len(self._token),
                            node.sequence,
                            context,
                            path,
                            node.texts,
                            node.room - 1,
                            node.seed,
                            node.position + 1,
                            node.is_random,
                        )
                    )
                self._sequence.append(node.sequence)
                self._parent.append(node.index)
                self._depth.append(level)
                self._token.append(token)
                self._rank.append(rank)
                self._gap.append(gap)
        return children

    def forest(self, batch: DraftBatch, acceptance: Acceptance) -> Forest:
        if not self._token:
            return empty_forest()
        self._add_noise_of_the_alone()
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

    def _add_noise_of_the_alone(self) -> None:
        """A single candidate competes with all tokens unseen: its noise tells how likely it beats them."""
        if not self._alone:
            return
        _, seeds, positions, tokens = zip(*self._alone, strict=True)
        for (node, *_), noise in zip(self._alone, gumbels(seeds, positions, tokens), strict=True):
            self._gap[node] = min(max(self._gap[node] + noise, 0.0), _MOST_GAP)


def _noise_of(torn: list[tuple[_Node, list[int], list[float], float]]) -> list[float]:
    """The law's noise of all candidates of nodes with several, in order."""
    if not torn:
        return []
    return gumbels(
        [node.seed for node, tokens, _, _ in torn for _ in tokens],
        [node.position for node, tokens, _, _ in torn for _ in tokens],
        [token for _, tokens, _, _ in torn for token in tokens],
    )


def _common_prefix(left: IntArray, right: IntArray) -> int:
    """
    >>> _common_prefix(np.array([1, 2, 3]), np.array([1, 2, 4, 5]))
    2
    """
    size = min(len(left), len(right))
    differing = np.flatnonzero(left[:size] != right[:size])
    return int(differing[0]) if len(differing) else size
