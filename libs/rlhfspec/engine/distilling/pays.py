"""Budget of drafter training: seconds spent against seconds saved."""

from __future__ import annotations

from rlhfspec.engine.base import LearningReport

_SHARE = 0.05  # of step time at most, without a configured share
_UPFRONT_SHARE = 0.01  # of elapsed time that may be spent before anything was saved
_FIRST_SECONDS, _FIRST_LABEL_SECONDS = 0.25, 1e-4  # estimates for a learning step and for a label, until measured
_MEMORY = 500.0  # verifications
_GAIN_KEPT = 0.6  # weight of the old estimate at every evaluation


class LearningBudget:
    """Budget of training time: a `share` of step time plus idle time or, without it, while savings exceed the cost.

    Savings assume that g accepted tokens would have been g * a0 / a1 untrained, with law a0 then and a1 now.

    >>> budget = LearningBudget(share=None)
    >>> budget.stepped(30.0, num_verifications=3, num_tokens=9)
    >>> budget.may_learn(idle=False)
    True
    >>> budget.spent(seconds=0.2, num_tokens=64)
    >>> budget.may_learn(idle=False)
    False
    >>> budget.agreed((0.5,), (0.8,))
    >>> budget.stepped(10.0, num_verifications=3, num_tokens=9)
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
        self._laws: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())  # at the start, now
        self._ratio = 1.0  # of both at depth 1
        self._verifications = self._tokens = 0.0  # decayed

    def stepped(self, seconds: float, num_verifications: int = 0, num_tokens: int = 0) -> None:
        """Add an engine step, with the verifications that the trained drafter drafted for, and their tokens."""
        self._step_seconds += seconds
        self._allowed += _UPFRONT_SHARE * seconds
        if not num_verifications:
            return
        kept = 0.5 ** (num_verifications / _MEMORY)
        self._verifications = kept * self._verifications + num_verifications
        self._tokens = kept * self._tokens + num_tokens
        now = max(self._tokens / self._verifications, 1.0)  # the end of a sequence may cut some off
        saved = seconds * (1.0 - (1.0 + (now - 1.0) * self._ratio) / now)
        self._saved += saved
        self._allowed += saved

    def idled(self, seconds: float) -> None:
        self._allowed += _UPFRONT_SHARE * seconds

    def agreed(self, at_first: tuple[float, ...], now: tuple[float, ...]) -> None:
        """Record the drafter's law on unseen lessons by depth, with first and current weights."""
        self._laws = at_first, now
        ratio = at_first[0] / now[0] if now[0] > 0 else 1.0
        first = self._ratio == 1.0
        self._ratio = ratio if first else _GAIN_KEPT * self._ratio + (1.0 - _GAIN_KEPT) * ratio

    def spent(self, *, seconds: float, num_tokens: int, idle: bool = False) -> None:
        self._seconds += seconds
        self._num_tokens += num_tokens
        if num_tokens:  # else the new weights were copied to the drafting model
            self._one_step_seconds = seconds
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
            law_before=self._laws[0], law_now=self._laws[1],
        )  # fmt: skip
