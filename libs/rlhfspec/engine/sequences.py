"""The sequences in the engine: one object each, and one table row each while they run.

Everything the hot path touches lies in arrays over rows, so that a step is a handful of numpy calls
whatever the batch size; the objects hold what is needed once per sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rlhfspec.drafting.base import FloatArray, IntArray
from rlhfspec.engine.base import Completion, FinishReason, Request, SequenceStats

NO_ROW = -1
SMALLEST = float(np.nextafter(np.float32(0), np.float32(1)))


@dataclass(slots=True)
class Progress:
    """What a sequence has produced; the part of it that survives preemption and travels in a move."""

    token_ids: IntArray  # prompt and response
    log_probs: FloatArray  # of the response
    tempered_log_probs: FloatArray
    weights_versions: IntArray
    counters: IntArray  # verifications, drafted, accepted, preemptions

    @classmethod
    def of_prompt(cls, prompt: tuple[int, ...]) -> Progress:
        none = np.empty(0, np.float32)
        return cls(np.asarray(prompt, np.int32), none, none, np.empty(0, np.int32), np.zeros(4, np.int32))


@dataclass(slots=True)
class Sequence:
    request: Request
    group: str
    progress: Progress
    stop_ids: tuple[int, ...]
    prefix_hashes: list[bytes]
    row: int = NO_ROW
    blocks: list[int] = field(default_factory=list)
    num_shared_blocks: int = 0  # leading blocks taken from siblings

    @property
    def is_running(self) -> bool:
        return self.row != NO_ROW

    def complete(self, reason: FinishReason, *, error: str = "", text: str | None = None) -> Completion:
        done, start = self.progress, len(self.request.prompt_token_ids)
        verifications, drafted, accepted, preemptions = (int(count) for count in done.counters)
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
            stats=SequenceStats(
                num_verifications=verifications, num_drafted=drafted, num_accepted=accepted, num_preemptions=preemptions
            ),
        )


class RowTable:
    """Arrays over rows [R] and over row and position [R, L]."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.tokens: IntArray = np.zeros((num_rows, width), np.int32)
        self.log_probs: FloatArray = np.zeros((num_rows, width), np.float32)
        self.tempered: FloatArray = np.zeros((num_rows, width), np.float32)
        self.versions: IntArray = np.zeros((num_rows, width), np.int32)
        self.lengths: IntArray = np.zeros(num_rows, np.int32)
        self.cached: IntArray = np.zeros(num_rows, np.int32)  # leading positions whose target KV is valid
        self.prompt_lengths: IntArray = np.zeros(num_rows, np.int32)
        self.limits: IntArray = np.zeros(num_rows, np.int32)  # prompt length + max_tokens
        self.seeds: npt.NDArray[np.uint64] = np.zeros(num_rows, np.uint64)
        self.temperatures: FloatArray = np.zeros(num_rows, np.float32)
        self.top_k: IntArray = np.zeros(num_rows, np.int32)
        self.top_p: FloatArray = np.ones(num_rows, np.float32)
        self.stop_ids: IntArray = np.full((num_rows, 1), -1, np.int32)
        self.counters: IntArray = np.zeros((num_rows, 4), np.int32)
        self.free_rows = list(range(num_rows - 1, -1, -1))

    def enter(self, sequence: Sequence) -> int:
        row = sequence.row = self.free_rows.pop()
        request, progress = sequence.request, sequence.progress
        length, prompt = len(progress.token_ids), len(request.prompt_token_ids)
        self.tokens[row, :length] = progress.token_ids
        self.log_probs[row, prompt:length] = progress.log_probs
        self.tempered[row, prompt:length] = progress.tempered_log_probs
        self.versions[row, prompt:length] = progress.weights_versions
        self.lengths[row], self.cached[row], self.prompt_lengths[row] = length, 0, prompt
        self.limits[row] = prompt + request.params.max_tokens
        self.seeds[row] = request.seed
        self.temperatures[row] = request.params.temperature
        self.top_k[row] = min(request.params.top_k, np.iinfo(np.int32).max)  # as much as all tokens
        self.top_p[row] = max(request.params.top_p, SMALLEST)  # the law rounds to float32, and one token always stays
        self.counters[row] = progress.counters
        self._set_stop_ids(row, sequence.stop_ids)
        return row

    def save(self, sequence: Sequence) -> None:
        """Copy the row's progress into the sequence object."""
        row = sequence.row
        prompt, length = int(self.prompt_lengths[row]), int(self.lengths[row])
        sequence.progress = Progress(
            token_ids=self.tokens[row, :length].copy(),
            log_probs=self.log_probs[row, prompt:length].copy(),
            tempered_log_probs=self.tempered[row, prompt:length].copy(),
            weights_versions=self.versions[row, prompt:length].copy(),
            counters=self.counters[row].copy(),
        )

    def leave(self, sequence: Sequence) -> None:
        self.save(sequence)
        self.lengths[sequence.row] = 0
        self.cached[sequence.row] = 0
        self.free_rows.append(sequence.row)
        sequence.row = NO_ROW

    def _set_stop_ids(self, row: int, stop_ids: tuple[int, ...]) -> None:
        if len(stop_ids) > self.stop_ids.shape[1]:
            wider = np.full((len(self.stop_ids), len(stop_ids)), -1, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(stop_ids)] = stop_ids
