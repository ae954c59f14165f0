"""Learned cost of one token for each of B sequences: `step_seconds + sequence_seconds * B`, both >= 0.

Least squares with forgetting; two synthetic observations define the slope until different B are seen.
"""

from __future__ import annotations

import numpy as np

from rlhfspec.common.arrays import Floats

_KEEP = 0.997  # share kept at each step: half-life of 230 steps
_GUESS = (8.0, 1.0)  # assumed shape: a step costs as much as eight sequences
_MADE_UP = ((1.0, 2.0), (32.0, 2.0))  # B and weight of the prior's observations
_MIN_OBSERVATIONS = 16  # observations before outliers are cut
_MOST_TIMES = 4.0  # times the expected cost; longer steps are cut, because the process was stopped


class LearnedCurve:
    """Cost curve of one engine. `prior` (step_seconds, sequence_seconds) gives only their ratio."""

    def __init__(self, prior: tuple[float, float] = _GUESS) -> None:
        self.prior = prior if sum(prior) > 0 else _GUESS
        self._moments = np.zeros((2, 2))  # decayed sums of (1, B) x (1, B)
        self._against = np.zeros(2)  # decayed sums of seconds x (1, B)
        self._prefill = [0.0, 0.0]  # decayed tokens and seconds
        self._num_learnt = 0
        self._solved: tuple[float, float] | None = None

    @property
    def num_learnt(self) -> int:
        return self._num_learnt

    @property
    def step_seconds(self) -> float:
        return self._solution()[0]

    @property
    def sequence_seconds(self) -> float:
        return self._solution()[1]

    @property
    def prefill_seconds(self) -> float:
        tokens, seconds = self._prefill
        return seconds / tokens if tokens else 0.0

    def seconds(self, num_running: float) -> float:
        step, sequence = self._solution()
        return step + sequence * num_running

    def learn(self, num_running: float, seconds: float) -> None:
        """Learn the seconds of one token for each of `num_running` sequences."""
        if num_running <= 0 or seconds <= 0:
            return
        if self._num_learnt >= _MIN_OBSERVATIONS:
            seconds = min(seconds, self.seconds(num_running) * _MOST_TIMES)
        ones = np.array([1.0, num_running])
        self._moments = self._moments * _KEEP + np.outer(ones, ones)
        self._against = self._against * _KEEP + ones * seconds
        self._num_learnt += 1
        self._solved = None

    def learn_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens <= 0:
            return
        own = max(seconds, 0.0)
        if self.prefill_seconds:
            own = min(own, self.prefill_seconds * num_tokens * _MOST_TIMES)
        self._prefill = [self._prefill[0] * _KEEP + num_tokens, self._prefill[1] * _KEEP + own]

    def _solution(self) -> tuple[float, float]:
        if self._solved is None:
            self._solved = self._solve() if self._num_learnt else (0.0, 0.0)
        return self._solved

    def _solve(self) -> tuple[float, float]:
        shape = np.array(self.prior)
        scale = self._against[0] / (self._moments[0] @ shape)  # scales the prior through the mean of the observations
        moments, against = self._moments.copy(), self._against.copy()
        for rows, weight in _MADE_UP:
            ones = np.array([1.0, rows])
            moments += weight * np.outer(ones, ones)
            against += weight * ones * scale * (ones @ shape)
        return _not_negative(moments, against)


def _not_negative(moments: Floats, against: Floats) -> tuple[float, float]:
    step, sequence = np.linalg.solve(moments, against).tolist()
    if step < 0:
        return 0.0, float(against[1] / moments[1, 1])
    if sequence < 0:
        return float(against[0] / moments[0, 0]), 0.0
    return step, sequence
