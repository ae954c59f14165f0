from __future__ import annotations

import random

from rlhfspec.job.roles import FailurePolicy
from rlhfspec.worker.exits import Failure

MOST_UNCOUNTED = 20  # for any policy: restarts without a trained step


class Restarts:
    """Restarts of one worker by the job's `failurePolicy`, counted since the last trained step."""

    def __init__(
        self, policy: FailurePolicy, draw: random.Random, *, num_counted: int = 0, num_uncounted: int = 0
    ) -> None:
        self._policy = policy
        self._draw = draw
        self.num_counted = num_counted
        self.num_uncounted = num_uncounted

    @property
    def num_failures(self) -> int:
        return self.num_counted + self.num_uncounted

    def counts(self, failure: Failure) -> bool:
        return failure in self._policy.counted

    def delay_after(self, failure: Failure, *, counts: bool | None = None) -> float | None:
        """Return the seconds before a restart, or None to give up. `counts` overrides the policy."""
        if counts is None:
            if failure == "permanent":
                return None
            counts = self.counts(failure)
        if counts:
            self.num_counted += 1
        else:
            self.num_uncounted += 1
        if self.num_counted > self._policy.max_restarts or self.num_uncounted > MOST_UNCOUNTED:
            return None
        return self.delay(self.num_failures)

    def delay(self, num_failures: int) -> float:
        doubled = self._policy.backoff_seconds * 2.0 ** min(num_failures - 1, 30)
        return min(doubled, self._policy.max_backoff_seconds) * self._draw.uniform(0.5, 1.0)

    def forget(self) -> None:
        self.num_counted = self.num_uncounted = 0
