"""Notices a drafter that stopped paying, pauses it, says so once, and tries again ever more rarely.

The commonest silent failure after a weight sync is a drafter that no longer agrees with the target: everything still
works, only slower than without it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

_LOG = logging.getLogger(__name__)
_PAYS = 0.98  # a gain between this and 1 is within what costs are known to
_KEPT = 0.93  # of the sums, per observed step
_FIRST_PAUSE, _LONGEST_PAUSE = 256, 8192  # steps; each further pause is twice as long


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
    gains: float = 0.0  # what plain decoding would have needed for the same tokens, over what was spent: decayed sum
    weight: float = 0.0
    num_below: int = 0  # drafted steps in a row with a gain below 1
    below_batch: int = 0  # the largest batch among them
    paused_until: int = 0
    paused_batch: int = 0
    pause_steps: int = 0


class Watchdog:
    """`patience`: observed steps in a row clearly below plain speed before a pause; a quarter of it on later trials."""

    def __init__(self, *, patience: int = 24) -> None:
        self._patience = patience
        self._watched: dict[str, _Watched] = {}

    def allows(self, drafter: str, step: int, num_sequences: int) -> bool:
        watched = self._watched.get(drafter)
        return watched is None or step >= watched.paused_until or num_sequences * 2 <= watched.paused_batch

    def observe(
        self, drafter: str, step: int, num_sequences: int, *, num_tokens: int, seconds: float, plain_seconds: float
    ) -> WatchdogEvent | None:
        """After a step that drafted; `plain_seconds` is what a plain step of the same batch would have cost."""
        watched = self._watched.setdefault(drafter, _Watched())
        watched.gains = _KEPT * watched.gains + plain_seconds * num_tokens / max(num_sequences, 1) / seconds
        watched.weight = _KEPT * watched.weight + 1.0  # every step counts alike, whatever its batch
        gain = watched.gains / watched.weight
        is_below = gain < _PAYS
        watched.num_below = watched.num_below + 1 if is_below else 0
        watched.below_batch = max(watched.below_batch, num_sequences) if is_below else 0
        if gain > 1.0 / _PAYS:  # pays again: forgive
            watched.pause_steps = 0
        if watched.num_below < (self._patience if watched.pause_steps == 0 else max(self._patience // 4, 3)):
            return None
        if watched.pause_steps == 0:
            _LOG.warning(
                "drafter %r gives %.2fx the speed of plain decoding at %d sequences: paused for %d steps, then retried",
                *(drafter, gain, num_sequences, _FIRST_PAUSE),
            )
        pause = min(max(2 * watched.pause_steps, _FIRST_PAUSE), _LONGEST_PAUSE)
        self._watched[drafter] = _Watched(
            paused_until=step + pause, paused_batch=watched.below_batch, pause_steps=pause
        )
        return WatchdogEvent(drafter=drafter, step=step, num_sequences=num_sequences, gain=gain, pause_steps=pause)

    def reset(self) -> None:
        """Weights changed: every drafter gets a new chance."""
        self._watched.clear()
