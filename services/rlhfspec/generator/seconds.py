"""How the engine's seconds are shared out among the samples that run."""

from __future__ import annotations


class SharedSeconds:
    """Each piece of work falls to all samples that were there, in equal parts.

    >>> seconds = SharedSeconds()
    >>> seconds.begin("a"); seconds.worked(1.0, num_running=1)
    >>> seconds.begin("b", so_far=3.0); seconds.worked(1.0, num_running=2)
    >>> seconds.of("a"), seconds.end("b")
    (1.5, 3.5)
    """

    def __init__(self) -> None:
        self._each = 0.0  # of each piece of work, what fell to each sample that was there
        self._before: dict[str, float] = {}  # of what runs: `_each` when it came

    def begin(self, sample_id: str, so_far: float = 0.0) -> None:
        """Count for a sample from now on. `so_far`: what it took of other engines."""
        self._before[sample_id] = self._each - so_far

    def worked(self, seconds: float, *, num_running: int) -> None:
        self._each += seconds / max(num_running, 1)

    def of(self, sample_id: str) -> float:
        return self._each - self._before[sample_id]

    def end(self, sample_id: str) -> float:
        """Return what it took, and forget it."""
        return self._each - self._before.pop(sample_id)
