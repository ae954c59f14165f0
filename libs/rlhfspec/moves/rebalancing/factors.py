"""Length factors of prompts (their responses' length over the usual), learned from finished responses."""

from __future__ import annotations

import math
from collections import OrderedDict

_CORRELATION = 0.5  # assumed, between log lengths of one prompt's answers
_KEPT_GROUPS, _KEPT_PROMPTS = 1 << 13, 1 << 16
_MOST_OF_HISTORY = 8.0  # weight limit of all earlier answers, in answers
_RATE = 0.01  # weight of the newest length in the running mean of log lengths


class Factors:
    """Length factors of groups (samples of one prompt in one step) and prompts (across steps).

    >>> factors = Factors()
    >>> for prompt in range(8):
    ...     factors.learn(f"sums/1/{prompt}", prompt, 100 if prompt else 400)
    >>> factors.learn("sums/1/0", 0, 400)
    >>> factors.of("sums/1/7") < 1.0 < factors.of("sums/1/0") < 4.0
    True
    """

    def __init__(self) -> None:
        self._usual = 0.0  # mean log length
        self._num_learnt = 0
        self._groups: OrderedDict[str, tuple[int, int, float]] = OrderedDict()  # prompt, answers, sum of deviations
        self._prompts: OrderedDict[int, tuple[float, float]] = OrderedDict()  # answers before, mean deviation

    def learn(self, group: str, prompt: int, length: int) -> None:
        log = math.log(max(length, 1))
        self._num_learnt += 1
        self._usual += (log - self._usual) * max(_RATE, 1 / self._num_learnt)
        _, number, total = self._groups.pop(group, (prompt, 0, 0.0))
        self._groups[group] = (prompt, number + 1, total + log - self._usual)
        if len(self._groups) > _KEPT_GROUPS:  # the oldest: its step is over
            _, (of, count, deviations) = self._groups.popitem(last=False)
            self._remember(of, count, deviations)

    def of(self, group: str) -> float:
        """Return the expected ratio of this group's lengths to the usual length."""
        if group not in self._groups:
            return 1.0
        prompt, number, total = self._groups[group]
        before, mean = self._prompts.get(prompt, (0.0, 0.0))
        answers = number + before
        shrunk = _CORRELATION * answers / (1 + (answers - 1) * _CORRELATION)
        return math.exp(shrunk * (total + before * mean) / answers)

    def _remember(self, prompt: int, number: int, total: float) -> None:
        before, mean = self._prompts.pop(prompt, (0.0, 0.0))
        self._prompts[prompt] = (min(before + number, _MOST_OF_HISTORY), (mean * before + total) / (before + number))
        if len(self._prompts) > _KEPT_PROMPTS:
            self._prompts.popitem(last=False)
