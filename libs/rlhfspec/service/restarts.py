"""When a worker that failed is started again, and when it is not: the job's `failurePolicy`.

Example:
    >>> restarts = Restarts(FailurePolicy(maxRestarts=1, backoffSeconds=2.0), random.Random(0))
    >>> 1.0 <= restarts.delay_after("error") <= 2.0, restarts.delay_after("error")
    (True, None)
"""

from __future__ import annotations

import random

from rlhfspec.job import FailurePolicy
from rlhfspec.service.exits import Failure

MOST_UNCOUNTED = 20  # whatever the policy: a worker that dies over and over, and no step is trained meanwhile


class Restarts:
    """Of one worker."""

    def __init__(self, policy: FailurePolicy, draw: random.Random) -> None:
        self._policy = policy
        self._draw = draw
        self._num_counted = 0
        self._num_uncounted = 0

    @property
    def num_failures(self) -> int:
        """Since the last trained step."""
        return self._num_counted + self._num_uncounted

    def delay_after(self, failure: Failure) -> float | None:
        """How long to wait before it is started again; None: not any more. Workers that failed together do not come
        back together."""
        if failure == "permanent":
            return None
        if failure in self._policy.counted:
            self._num_counted += 1
        else:
            self._num_uncounted += 1
        if self._num_counted > self._policy.max_restarts or self._num_uncounted > MOST_UNCOUNTED:
            return None
        doubled = self._policy.backoff_seconds * 2.0 ** min(self.num_failures - 1, 30)
        return min(doubled, self._policy.max_backoff_seconds) * self._draw.uniform(0.5, 1.0)

    def forget(self) -> None:
        """There was progress since."""
        self._num_counted = self._num_uncounted = 0
