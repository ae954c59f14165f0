"""Budget of drafter training: seconds spent against seconds saved."""

from __future__ import annotations

import numpy as np

from rlhfspec.common.arrays import IntArray
from rlhfspec.engine.base import LearningReport

_SHARE = 0.05  # of step time at most, without a configured share
_UPFRONT_SHARE = 0.01  # of elapsed time that may be spent before anything was saved
_FIRST_SECONDS, _FIRST_LABEL_SECONDS = 0.25, 1e-4  # estimates for a learning step and for a label, until measured
_MEMORY = 500.0  # verifications; also the sample that describes the drafter before learning
_DEEPEST = 32  # drafted tokens of one path that are counted separately
_GAIN_KEPT = 0.6  # weight of the old estimate at every evaluation


class LearningBudget:
    """Budget of training time: a `share` of step time plus idle time or, without it, while savings exceed the cost.

    Savings assume that g accepted tokens would have been g * a0 / a1 untrained, with agreement a0 then and a1 now.

    >>> budget = LearningBudget(share=None)
    >>> budget.stepped(seconds=30.0, drafted_seconds=30.0, num_tokens=np.array([3, 2, 4]))
    >>> budget.may_learn(idle=False)
    True
    >>> budget.spent(seconds=0.2, num_tokens=64)
    >>> budget.may_learn(idle=False)
    False
    >>> budget.agreed(0.5, 0.8)
    >>> budget.stepped(seconds=10.0, drafted_seconds=10.0, num_tokens=np.array([3, 3, 3]))
    >>> round(budget.report.saved_seconds, 2), budget.may_learn(idle=False)
    (2.5, True)
    """

    def __init__(self, *, share: float | None) -> None:
        self._share = share
        self._step_seconds = self._busy_spent = 0.0
        self._allowed = 0.0  # seconds that may be spent in all, without a share
        self._seconds = self._saved = 0.0
        self._num_tokens = 0
        self._one_step_seconds, self._label_seconds = _FIRST_SECONDS, _FIRST_LABEL_SECONDS
        self._agreements: tuple[float | None, float | None] = (None, None)  # at the start, now
        self._ratio = 1.0  # agreement at the start over agreement now
        self._is_new = True  # nothing was learnt yet
        self._before, self._now = _Rate(), _Rate()
        self._num_accepted = np.zeros(_DEEPEST + 1, np.int64)

    def stepped(self, *, seconds: float, drafted_seconds: float, num_tokens: IntArray) -> None:
        """Add engine steps. Only steps of the trained drafter count in `drafted_seconds` and `num_tokens`."""
        self._step_seconds += seconds
        self._allowed += _UPFRONT_SHARE * seconds
        if not len(num_tokens):
            return
        accepted = np.clip(num_tokens - 1, 0, _DEEPEST)  # the end of a sequence may cut some off
        self._num_accepted += np.bincount(accepted, minlength=_DEEPEST + 1)
        self._now.add(len(num_tokens), int(num_tokens.sum()))
        if self._is_new:
            self._before.add(len(num_tokens), int(num_tokens.sum()))
        now = self._now.value or 1.0
        saved = drafted_seconds * (1.0 - (1.0 + (now - 1.0) * self._ratio) / now)
        self._saved += saved
        self._allowed += saved

    def idled(self, seconds: float) -> None:
        self._allowed += _UPFRONT_SHARE * seconds

    def took(self) -> None:
        self._is_new = False

    def agreed(self, at_first: float, now: float) -> None:
        """Record the drafter's agreement with the target on unseen lessons, with first and current weights."""
        self._agreements = at_first, now
        ratio = at_first / now if now > 0 else 1.0
        first = self._ratio == 1.0
        self._ratio = ratio if first else _GAIN_KEPT * self._ratio + (1.0 - _GAIN_KEPT) * ratio

    def watched(self, *, seconds: float) -> None:
        self._allowed -= seconds

    def spent(self, *, seconds: float, num_tokens: int, idle: bool = False) -> None:
        self._seconds += seconds
        self._num_tokens += num_tokens
        if num_tokens:  # else the new weights were copied to the drafting model
            self._one_step_seconds, self._is_new = seconds, False
        self._busy_spent += 0.0 if idle else seconds

    def recorded(self, *, seconds: float, num_tokens: int = 0) -> None:
        """Add the seconds of labelling `num_tokens` tokens, or of storing a lesson (0 tokens)."""
        self._seconds += seconds
        self._busy_spent += seconds
        if num_tokens:
            self._label_seconds = seconds / num_tokens

    def may_record(self, num_tokens: int) -> bool:
        return self._share is not None or self._seconds + num_tokens * self._label_seconds <= self._allowed

    def may_learn(self, *, idle: bool) -> bool:
        share = _SHARE if self._share is None else self._share
        if not idle and self._busy_spent >= share * self._step_seconds:
            return False
        return self._share is not None or self._seconds + self._one_step_seconds <= self._allowed

    @property
    def report(self) -> LearningReport:
        return LearningReport(
            num_tokens=self._num_tokens, seconds=self._seconds, saved_seconds=self._saved,
            tokens_before=self._before.value, tokens_now=self._now.value,
            agreement_before=self._agreements[0], agreement_now=self._agreements[1],
            num_accepted=tuple(np.trim_zeros(self._num_accepted, "b").tolist()),
        )  # fmt: skip


class _Rate:
    def __init__(self) -> None:
        self._verifications = self._tokens = 0.0

    def add(self, verifications: int, tokens: int) -> None:
        kept = 0.5 ** (verifications / _MEMORY)
        self._verifications = kept * self._verifications + verifications
        self._tokens = kept * self._tokens + tokens

    @property
    def value(self) -> float | None:
        return self._tokens / self._verifications if self._verifications else None
