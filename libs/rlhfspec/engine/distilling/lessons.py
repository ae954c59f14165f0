"""Training data of a drafter: the target's distributions of verified tokens, in a bounded ring."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from rlhfspec.common.arrays import FloatArray, IntArray

NUM_LABELS = 32  # tokens per label; less likely ones are left out
LONGEST_LESSON = 256  # tokens
_MAX_RECORDED_ROWS = 16  # sequences recorded at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """Piece of a sequence, with the target's likeliest tokens (labels) in place of each of its tokens."""

    tokens: IntArray  # [n]
    label_ids: IntArray  # [n, K]
    label_log_probs: FloatArray  # [n, K] under the tempered target
    temperature: float
    states: torch.Tensor  # [n, taps * width] of the target's layers where each label was made

    @property
    def num_labels(self) -> int:
        return len(self.label_ids)


class LessonRing:
    """Ring of the newest lessons, each taken up to `passes` times, but only once while the ring is under half full.

    >>> ring = LessonRing(most_tokens=4, passes=2)
    >>> def lesson(n): return Lesson(tokens=np.zeros(n, np.int32), label_ids=np.zeros((n, 2), np.int32),
    ...     label_log_probs=np.zeros((n, 2), np.float32), temperature=1.0, states=torch.zeros(n, 1))
    >>> for n in (1, 2, 2):
    ...     ring.add(lesson(n))
    >>> ring.num_tokens, [each.num_labels for each in ring.take(most_tokens=3)], ring.num_fresh
    (4, [2], 2)
    """

    def __init__(self, *, most_tokens: int, passes: int) -> None:
        self._most_tokens = most_tokens
        self._passes = passes
        self._fresh: deque[Lesson] = deque()
        self._again: deque[tuple[int, Lesson]] = deque()  # (times taken, lesson); the next one first
        self.num_fresh = 0  # labelled tokens never taken
        self.num_tokens = 0

    @property
    def is_full_of_fresh(self) -> bool:
        return 2 * self.num_fresh > self._most_tokens

    def add(self, lesson: Lesson) -> None:
        self._fresh.append(lesson)
        self.num_fresh += lesson.num_labels
        self.num_tokens += lesson.num_labels
        while self.num_tokens > self._most_tokens:
            self.num_tokens -= (self._again.pop()[1] if self._again else self._pop_fresh()).num_labels

    def take(self, *, most_tokens: int) -> list[Lesson]:
        """Return the next lessons: at least one, and at most `most_tokens` labelled tokens, or twice that if padded."""
        taken: list[tuple[int, Lesson]] = []
        count = longest = 0
        may_repeat = 2 * self.num_tokens >= self._most_tokens
        while self._fresh or (may_repeat and self._again):
            ahead = self._fresh[0] if self._fresh else self._again[0][1]
            longest = max(longest, ahead.num_labels)
            is_padded = (len(taken) + 1) * longest > 2 * most_tokens
            if taken and (is_padded or count + ahead.num_labels > most_tokens):
                break
            taken.append((0, self._pop_fresh()) if self._fresh else self._again.popleft())
            count += ahead.num_labels
        again = [(times + 1, lesson) for times, lesson in taken if times + 1 < self._passes]
        self._again.extend(again)
        self.num_tokens -= count - sum(lesson.num_labels for _, lesson in again)
        return [lesson for _, lesson in taken]

    def _pop_fresh(self) -> Lesson:
        lesson = self._fresh.popleft()
        self.num_fresh -= lesson.num_labels
        return lesson


@dataclass(slots=True)
class _Recording:
    temperature: float
    start: int = 0
    ids: list[IntArray] = field(default_factory=list)
    log_probs: list[FloatArray] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_labels(self) -> int:
        return sum(map(len, self.ids))


class LessonRecorder:
    """Collector of labels by table row, which turns them into lessons for the ring."""

    def __init__(self, ring: LessonRing) -> None:
        self._ring = ring
        self.rows: dict[int, _Recording] = {}  # by table row
        self.within: set[int] = set()  # rows with an open lesson that has room

    def start(self, row: int, temperature: float) -> None:
        """Start recording the sequence that took the row, if few others are being recorded."""
        if len(self.rows) < _MAX_RECORDED_ROWS:
            self.rows[row] = _Recording(temperature)

    def note(
        self, row: int, position: int, ids: IntArray, log_probs: FloatArray, tokens: IntArray, states: torch.Tensor
    ) -> None:
        """Add labels [n, K] of a row's tokens from `position` on; `tokens` are those before `position`."""
        recording = self.rows[row]
        if not recording.ids:
            recording.start = position
        elif recording.num_labels >= LONGEST_LESSON:
            self._close(recording, tokens)
            recording.start = position
        recording.ids.append(ids)
        recording.log_probs.append(log_probs)
        recording.states.append(states)
        (self.within.add if recording.num_labels < LONGEST_LESSON else self.within.discard)(row)

    def forget(self, row: int, tokens: IntArray) -> bool:
        """Stop recording a row with these tokens; return whether a last lesson was added."""
        recording = self.rows.pop(row, None)
        self.within.discard(row)
        if recording is None or not recording.ids:
            return False
        self._close(recording, tokens)
        return True

    def _close(self, recording: _Recording, tokens: IntArray) -> None:
        ids, log_probs = np.concatenate(recording.ids), np.concatenate(recording.log_probs)
        states = torch.cat(recording.states)
        for parts in (recording.ids, recording.log_probs, recording.states):
            parts.clear()
        if len(ids) == 1:
            return  # a head learns the label after a state and its token
        end = recording.start + len(ids)
        assert end <= len(tokens), "a label without its token"
        self._ring.add(
            Lesson(
                tokens=tokens[recording.start : end].copy(), label_ids=ids, label_log_probs=log_probs,
                temperature=recording.temperature, states=states,
            )
        )  # fmt: skip
