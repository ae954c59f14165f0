"""Clock that excludes time in which the process was stopped (Ctrl-Z, SIGSTOP, suspend)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

STOPPED_SECONDS = 5.0


class AwakeClock:
    """Monotonic clock, read every second, that leaves out stops: late reads with little CPU time in between."""

    def __init__(
        self,
        *,
        stopped_seconds: float = STOPPED_SECONDS,
        passed: Callable[[], float] = time.monotonic,
        computed: Callable[[], float] = time.process_time,
    ) -> None:
        self._stopped_seconds = stopped_seconds
        self._passed = passed
        self._computed = computed
        self._lock = threading.Lock()
        self._last_passed, self._last_computed = passed(), computed()
        self._lost = 0.0

    def now(self) -> float:
        with self._lock:
            passed, computed = self._passed(), self._computed()
            gap = passed - self._last_passed
            if gap > self._stopped_seconds and computed - self._last_computed < 0.1 * gap:
                self._lost += gap
            self._last_passed, self._last_computed = passed, computed
            return passed - self._lost

    async def sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, self._stopped_seconds / 5))
            self.now()
