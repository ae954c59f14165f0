"""Online learning of the drafter from verified tokens. Tokens never depend on it, so it may be late or lossy."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from rlhfspec.common.arrays import FloatArray, IntArray
from rlhfspec.engine.base import Learning, LearningReport, Learnt
from rlhfspec.engine.distilling.lessons import LONGEST_LESSON, NUM_LABELS, LessonRecorder, LessonRing
from rlhfspec.engine.distilling.pays import LearningBudget
from rlhfspec.engine.kv.state import EngineState
from rlhfspec.engine.scheduling.sequences import Sequence
from rlhfspec.engine.scheduling.verify import Committed
from rlhfspec.job.choices.drafters import DRAFTERS

Indices = npt.NDArray[np.int64]
_RUN_DRAFT_MODEL = frozenset(name for name, entry in DRAFTERS.items() if entry.runs_draft_model)
RING_TOKENS, PASSES = 32768, 4
LESSON_TOKENS = 512  # labelled tokens of one optimizer step
_SWAP_EVERY = 4  # optimizer steps, or when the lessons run out
_EVALUATE_EVERY = 16  # optimizer steps between two evaluations; the first ones come sooner


def next_look(num_steps: int) -> int:
    """Return the next evaluation's optimizer step.

    >>> [next_look(steps) for steps in (0, 2, 4, 8, 16, 32)]
    [2, 4, 8, 16, 32, 48]
    """
    return num_steps + min(max(num_steps, 2), _EVALUATE_EVERY)


class DraftLearning:
    """Learning loop that trains `state.student`, a copy of the drafter, and hands its weights to the drafter."""

    def __init__(self, state: EngineState) -> None:
        assert state.student is not None
        assert state.eagle is not None
        self._student, self._drafts, self._rows = state.student, state.eagle, state.rows
        share = state.config.learning
        self.budget = LearningBudget(share=None if isinstance(share, str) else float(share))
        self._ring = LessonRing(most_tokens=RING_TOKENS, passes=PASSES)
        self._recorder = LessonRecorder(self._ring)
        self._num_steps = 0
        self._next_look = next_look(0)
        self._is_better = True  # than at the start, as far as is known; otherwise the drafter uses its first weights
        self._num_unseen = 0  # optimizer steps not yet in the drafting copy
        self._idle_since: float | None = None  # None: it has just generated
        self.version = 0  # tokens that these weights have learnt from, here or elsewhere

    def start(self, sequence: Sequence) -> None:
        self._recorder.start(sequence.row, self._temperature(sequence.row))

    def forget(self, sequence: Sequence) -> None:
        row = sequence.row
        began = time.perf_counter()
        if self._recorder.forget(row, self._rows.tokens[row, : self._rows.lengths[row]]):
            self.budget.recorded(seconds=time.perf_counter() - began)

    @property
    def records(self) -> bool:
        recorder = self._recorder
        return bool(recorder.within or (recorder.rows and self.budget.may_record(LONGEST_LESSON)))

    def record(self, new: Committed, kept: IntArray, logits: torch.Tensor, logit_rows: IntArray) -> None:
        """Record labels of committed tokens. `logit_rows`: each logit's row in the forward."""
        began = time.perf_counter()
        chosen = self._chosen(new.rows.tolist(), kept)
        if not chosen:
            return
        places = [new.places[s, : kept[s]] for s in chosen]
        rows = new.rows[chosen]
        ids, log_probs = _labels(logits, places, [self._temperature(row) for row in rows.tolist()])
        states = self._drafts.states_of(logit_rows[np.concatenate(places)])
        first = 0
        for row, place in zip(rows.tolist(), places, strict=True):
            length, last = int(self._rows.lengths[row]), first + len(place)
            self._recorder.note(
                row, length, ids[first:last], log_probs[first:last], self._rows.tokens[row, :length],
                states[first:last],
            )  # fmt: skip
            first = last
        self.budget.recorded(seconds=time.perf_counter() - began, num_tokens=first)

    def _chosen(self, rows: list[int], kept: IntArray) -> list[int]:
        """Return indices into `rows` of sequences to record: first those within a lesson, then others."""
        known, within = self._recorder.rows, self._recorder.within
        chosen = [s for s, row in enumerate(rows) if row in within and kept[s]]
        for s, row in enumerate(rows):
            if row in known and row not in within and kept[s]:
                if not self._may_begin(len(chosen) + 1):
                    break  # no other may begin either
                chosen.append(s)
        return chosen

    def _may_begin(self, num_lessons: int) -> bool:
        return self.budget.may_record(num_lessons * LONGEST_LESSON) and not self._ring.is_full_of_fresh

    def stepped(
        self, seconds: float, num_verifications: int, num_tokens: int, drafter: str | None, *, has_finished: bool
    ) -> None:
        """Take note of a step's verifications and their tokens. Train if due, unless it finished a sequence."""
        is_mine = drafter in _RUN_DRAFT_MODEL
        self.budget.stepped(seconds, num_verifications if is_mine else 0, num_tokens)
        self._idle_since = None
        if self._ring.num_fresh >= LESSON_TOKENS and not has_finished and self.budget.may_learn(idle=False):
            self._learn(idle=False)

    def learn_while_idle(self) -> bool:
        now = time.perf_counter()
        if self._idle_since is not None:
            self.budget.idled(now - self._idle_since)
        self._idle_since = now
        return self._learn(idle=True)

    def _learn(self, *, idle: bool) -> bool:
        are_fresh = self._ring.num_fresh >= LESSON_TOKENS
        if not self.budget.may_learn(idle=idle):
            return False
        began = self._idle_since = time.perf_counter()
        lessons = self._ring.take(most_tokens=LESSON_TOKENS)
        if not lessons:
            self._swap()
            self.budget.spent(seconds=time.perf_counter() - began, num_tokens=0, idle=idle)
            return False
        if are_fresh and self._num_steps >= self._next_look:
            at_first, now = self._student.law(lessons, at_first=True), self._student.law(lessons)
            self.budget.agreed(at_first, now)
            self._is_better = now[0] > at_first[0]
            self._next_look = next_look(self._num_steps)
        self._student.learn(lessons)
        self._num_steps += 1
        self._num_unseen += 1
        if self._num_unseen == _SWAP_EVERY:
            self._swap()
        num_tokens = sum(lesson.num_labels for lesson in lessons)
        self.version += num_tokens
        self.budget.spent(seconds=time.perf_counter() - began, num_tokens=num_tokens, idle=idle)
        return True

    def learnt(self) -> Learnt:
        """Return the weights to draft with: the initial ones, unless the learnt ones are better."""
        return Learnt(version=self.version, tensors=self._student.learnt(at_first=not self._is_better))

    def take(self, learnt: Learnt) -> bool:
        if learnt.version <= self.version:
            return False
        self._student.take(learnt.tensors)
        self.version, self._num_unseen, self._is_better = learnt.version, 0, True
        self._hand_over()
        return True

    def _swap(self) -> None:
        if self._num_unseen:
            self._hand_over()
            self._num_unseen = 0

    def _hand_over(self) -> None:
        self._drafts.load_weights(self._student.state_dict(at_first=not self._is_better))

    def _temperature(self, row: int) -> float:
        return float(self._rows.temperatures[row]) or 1.0

    @property
    def report(self) -> LearningReport:
        return replace(self.budget.report, version=self.version)


_: type[Learning] = DraftLearning  # mypy checks the protocol


def _labels(logits: torch.Tensor, places: list[Indices], temperatures: list[float]) -> tuple[IntArray, FloatArray]:
    """Return the K likeliest tokens and log-probs [n, K] of logits rows `places`, at one temperature per sequence."""
    index = torch.from_numpy(np.concatenate(places)).to(logits.device)
    lengths = [len(place) for place in places]
    each = torch.from_numpy(np.repeat(np.asarray(temperatures, np.float32), lengths)).to(logits.device)
    top = (logits.index_select(0, index) / each[:, None]).log_softmax(-1).topk(min(NUM_LABELS, logits.shape[-1]))
    return top.indices.int().cpu().numpy(), top.values.half().cpu().numpy()
