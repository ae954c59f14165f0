"""Sequences of the engine, and the table of arrays with one row for each running sequence."""

from __future__ import annotations

import time
from collections.abc import Iterable, MutableSequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rlhfspec.common.arrays import FloatArray, IntArray
from rlhfspec.engine.base import Completion, FinishReason, Manifest, Request, SequenceStats

if TYPE_CHECKING:
    from rlhfspec.engine.kv.cache import Prefix, RestingKV

NO_ROW = -1
VERIFICATIONS, DRAFTED, ACCEPTED, PREEMPTIONS, MOVES = range(5)  # columns of the counters
NUM_COUNTERS = 5
SMALLEST = float(np.nextafter(np.float32(0), np.float32(1)))


@dataclass(slots=True)
class Generated:
    """Tokens and counters of a sequence, which survive preemption and moves."""

    token_ids: IntArray  # prompt and response
    log_probs: FloatArray  # of the response
    tempered_log_probs: FloatArray
    weights_versions: IntArray
    counters: IntArray  # indexed by the constants above
    strategies: dict[str, int] = field(default_factory=dict)  # plan name -> decoding steps under it

    @classmethod
    def of_prompt(cls, prompt: tuple[int, ...], response: Iterable[int] = ()) -> Generated:
        """Return the state before a step. `response`: tokens that another engine sampled, without their log-probs."""
        token_ids = np.asarray((*prompt, *response), np.int32)
        unknown = np.zeros(len(token_ids) - len(prompt), np.float32)
        return cls(token_ids, unknown, unknown, unknown.astype(np.int32), np.zeros(NUM_COUNTERS, np.int32))


@dataclass(slots=True, eq=False)
class Sequence:
    request: Request
    group: str
    generated: Generated
    stop_ids: tuple[int, ...]
    prefix: Prefix  # blocks that others may share
    row: int = NO_ROW
    blocks: list[int] = field(default_factory=list)
    num_shared_blocks: int = 0  # leading blocks taken from siblings
    resting: tuple[RestingKV, ...] = ()  # one per KV space, if it holds blocks without a row
    num_promised: tuple[int, ...] = ()  # while it arrives, per KV space: leading blocks that siblings hold or bring
    epoch: int = 0  # 0 without a row, and new for every stay: KV of one stay does not fit the next
    origin: Manifest | None = None  # if it is arriving from another engine
    arrived: float = field(default_factory=time.monotonic)

    @property
    def has_row(self) -> bool:
        return self.row != NO_ROW

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens; stale while running (read `RowTable.lengths`)."""
        return len(self.generated.token_ids)

    def complete(self, reason: FinishReason, *, error: str = "", text: str | None = None) -> Completion:
        done, start = self.generated, len(self.request.prompt_token_ids)
        return Completion(
            id=self.request.id,
            prompt_token_ids=self.request.prompt_token_ids,
            token_ids=tuple(done.token_ids[start:].tolist()),
            log_probs=tuple(done.log_probs.tolist()),
            tempered_log_probs=tuple(done.tempered_log_probs.tolist()),
            weights_versions=tuple(done.weights_versions.tolist()),
            finish_reason=reason,
            error=error,
            text=text,
            stats=stats_of(done.counters.tolist(), done.strategies.items()),
        )


def stats_of(counters: Iterable[int], strategies: Iterable[tuple[str, int]]) -> SequenceStats:
    """Build statistics from a sequence's counters and (plan, steps) pairs.

    >>> stats_of((30, 8, 5, 0, 2), [("suffix", 4), ("plain", 26)]).strategies
    (('plain', 26), ('suffix', 4))
    """
    verifications, drafted, accepted, preemptions, moves = counters
    return SequenceStats(
        num_verifications=verifications,
        num_drafted=drafted,
        num_accepted=accepted,
        num_preemptions=preemptions,
        num_moves=moves,
        strategies=tuple(sorted(strategies)),
    )


class RowTable:
    def __init__(self, num_rows: int, width: int) -> None:
        self.tokens: IntArray = np.zeros((num_rows, width), np.int32)
        self.log_probs: FloatArray = np.zeros((num_rows, width), np.float32)
        self.tempered: FloatArray = np.zeros((num_rows, width), np.float32)
        self.versions: IntArray = np.zeros((num_rows, width), np.int32)
        self.lengths: IntArray = np.zeros(num_rows, np.int32)
        self.prompt_lengths: IntArray = np.zeros(num_rows, np.int32)
        self.limits: IntArray = np.zeros(num_rows, np.int32)  # prompt length + max_tokens
        self.seeds: npt.NDArray[np.uint64] = np.zeros(num_rows, np.uint64)
        self.temperatures: FloatArray = np.zeros(num_rows, np.float32)
        self.top_k: IntArray = np.zeros(num_rows, np.int32)
        self.top_p: FloatArray = np.ones(num_rows, np.float32)
        self.stop_ids: IntArray = np.full((num_rows, 1), -1, np.int32)
        self.counters: IntArray = np.zeros((num_rows, NUM_COUNTERS), np.int32)
        self.strategy_names: dict[str, int] = {}  # plan name -> column of strategy_steps
        self.strategy_steps: IntArray = np.zeros((num_rows, 8), np.int32)
        self.free_rows = list(range(num_rows - 1, -1, -1))

    def enter(self, sequence: Sequence) -> int:
        sequence.row = self.free_rows.pop()
        self.write(sequence)
        return sequence.row

    def write(self, sequence: Sequence) -> None:
        row = sequence.row
        request, generated = sequence.request, sequence.generated
        length, prompt = len(generated.token_ids), len(request.prompt_token_ids)
        self.tokens[row, :length] = generated.token_ids
        self.log_probs[row, prompt:length] = generated.log_probs
        self.tempered[row, prompt:length] = generated.tempered_log_probs
        self.versions[row, prompt:length] = generated.weights_versions
        self.lengths[row], self.prompt_lengths[row] = length, prompt
        self.limits[row] = prompt + request.params.max_tokens
        self.seeds[row] = request.seed
        self.temperatures[row] = request.params.temperature
        self.top_k[row] = min(request.params.top_k, np.iinfo(np.int32).max)  # int32 max keeps all tokens
        self.top_p[row] = max(request.params.top_p, SMALLEST)  # the law rounds to float32, and one token always stays
        self.counters[row] = generated.counters
        self.strategy_steps[row] = 0
        for name, steps in generated.strategies.items():
            column = self._strategy_column(name)
            self.strategy_steps[row, column] = steps
        self._set_stop_ids(row, sequence.stop_ids)

    def save(self, sequence: Sequence) -> None:
        row = sequence.row
        prompt, length = int(self.prompt_lengths[row]), int(self.lengths[row])
        sequence.generated = Generated(
            token_ids=self.tokens[row, :length].copy(),
            log_probs=self.log_probs[row, prompt:length].copy(),
            tempered_log_probs=self.tempered[row, prompt:length].copy(),
            weights_versions=self.versions[row, prompt:length].copy(),
            counters=self.counters[row].copy(),
            strategies={
                name: steps
                for name, steps in zip(self.strategy_names, self.strategy_steps[row].tolist(), strict=False)
                if steps
            },
        )

    def leave(self, sequence: Sequence) -> None:
        self.save(sequence)
        self.lengths[sequence.row] = 0
        self.free_rows.append(sequence.row)
        sequence.row = NO_ROW

    def count_step(self, decode_rows: IntArray, strategy: str) -> None:
        column = self._strategy_column(strategy)  # first: it may need a wider table
        self.strategy_steps[decode_rows, column] += 1

    def _strategy_column(self, name: str) -> int:
        column = self.strategy_names.setdefault(name, len(self.strategy_names))
        if column == self.strategy_steps.shape[1]:
            self.strategy_steps = np.concatenate((self.strategy_steps, np.zeros_like(self.strategy_steps)), axis=1)
        return column

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        if len(stop_ids) > self.stop_ids.shape[1]:
            wider = np.full((len(self.stop_ids), len(stop_ids)), -1, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stop_ids)] = stop_ids


def by_age(line: MutableSequence[Sequence], sequence: Sequence) -> None:
    """Insert a sequence into a queue ordered by priority and arrival."""

    def place(each: Sequence) -> tuple[int, float]:
        return -each.request.priority, each.arrived

    behind = (index for index, other in enumerate(line) if place(other) > place(sequence))
    line.insert(next(behind, len(line)), sequence)
