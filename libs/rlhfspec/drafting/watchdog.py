"""Notices a drafter that stopped paying, pauses it, says so once, and tries again ever more rarely.

The commonest silent failure after a weight sync is a drafter that no longer agrees with the target: everything still
works, only slower than without it.

Example:
    >>> watchdog = Watchdog(patience=3)
    >>> for step in range(3):  # 8 sequences gave 9 tokens in the time in which plain decoding gives 16
    ...     event = watchdog.observe("model", step, 8, num_tokens=9, seconds=0.02, plain_seconds=0.01)
    >>> event.drafter, round(event.gain, 2), watchdog.allows("model", 4, 8)
    ('model', 0.56, False)
    >>> watchdog.allows("model", 4, 3)  # a much smaller batch is another matter
    True
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

_LOG = logging.getLogger(__name__)
_PAYS = 0.98  # a gain between this and 1 is within what costs are known to
_KEPT = 0.93  # of the sums, per observed step


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchdogEvent:
    """A drafter was paused. `gain`: realised tokens/s against plain decoding (1 = no gain)."""

    drafter: str
    step: int
    num_sequences: int
    gain: float
    pause_steps: int


@dataclass(slots=True)
class _Watched:
    worth_seconds: float = 0.0  # what plain decoding would have needed for the same tokens
    spent_seconds: float = 0.0
    num_below: int = 0  # drafted steps in a row with a gain below 1
    paused_until: int = 0
    paused_batch: int = 0
    pause_steps: int = 0
    warned: bool = False

    @property
    def gain(self) -> float:
        return self.worth_seconds / self.spent_seconds if self.spent_seconds else 1.0

    def start_over(self) -> None:
        self.worth_seconds = self.spent_seconds = 0.0
        self.num_below = 0


class Watchdog:
    """`patience`: observed steps in a row clearly below plain speed before a pause of `first_pause` steps.

    Each further pause is twice as long, up to `longest_pause`.
    """

    def __init__(self, *, patience: int = 24, first_pause: int = 256, longest_pause: int = 8192) -> None:
        self._patience = patience
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._watched: dict[str, _Watched] = {}

    def allows(self, drafter: str, step: int, num_sequences: int) -> bool:
        watched = self._watched.get(drafter)
        if watched is None or step >= watched.paused_until:
            return True
        return num_sequences * 2 <= watched.paused_batch

    def observe(
        self, drafter: str, step: int, num_sequences: int, *, num_tokens: int, seconds: float, plain_seconds: float
    ) -> WatchdogEvent | None:
        """After a step that drafted; `plain_seconds` is what a plain step of the same batch would have cost."""
        watched = self._watched.setdefault(drafter, _Watched())
        watched.worth_seconds = _KEPT * watched.worth_seconds + plain_seconds * num_tokens / max(num_sequences, 1)
        watched.spent_seconds = _KEPT * watched.spent_seconds + seconds
        if watched.gain >= _PAYS:
            watched.num_below = 0
            if watched.worth_seconds > 1.05 * watched.spent_seconds:  # pays again: forgive
                watched.pause_steps, watched.warned = 0, False
            return None
        watched.num_below += 1
        patience = self._patience if watched.pause_steps == 0 else max(self._patience // 4, 3)  # on trial
        if watched.num_below < patience:
            return None
        return self._pause(drafter, watched, step, num_sequences)

    def reset(self) -> None:
        """Weights changed: every drafter gets a new chance."""
        self._watched.clear()

    def _pause(self, drafter: str, watched: _Watched, step: int, num_sequences: int) -> WatchdogEvent:
        gain = watched.gain
        watched.pause_steps = min(max(2 * watched.pause_steps, self._first_pause), self._longest_pause)
        watched.paused_until = step + watched.pause_steps
        watched.paused_batch = num_sequences
        watched.start_over()
        if not watched.warned:
            watched.warned = True
            _LOG.warning(
                "drafter %r gives %.2fx the speed of plain decoding at %d sequences: paused for %d steps, then retried",
                drafter,
                gain,
                num_sequences,
                watched.pause_steps,
            )
        return WatchdogEvent(
            drafter=drafter, step=step, num_sequences=num_sequences, gain=gain, pause_steps=watched.pause_steps
        )
