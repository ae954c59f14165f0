"""A receiver's choice between group and store, by recently measured speed."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable
from statistics import median
from typing import Literal

Way = Literal["group", "store"]
TRIALS = 2  # of the group before it is judged; the first includes forming it
AGAIN = 64  # versions by the store after which the group is tried again
_MEDIAN_OF = 3  # of each way; their median counts
log = logging.getLogger(__name__)


class Ways:
    """Thread-safe record of transfer times, by which `transfer` auto decides. `told`: callback after each version."""

    def __init__(
        self, transfer: Literal["auto", "group", "store"], told: Callable[[str, float], None] = lambda *_: None
    ) -> None:
        self._transfer = transfer
        self._told = told
        self._lock = threading.Lock()
        self._seconds: dict[Way, deque[float]] = {"group": deque(maxlen=_MEDIAN_OF), "store": deque(maxlen=_MEDIAN_OF)}
        self._since_group = 0
        self.taken: Counter[str] = Counter()  # versions by way

    def took(self, way: Way, seconds: float) -> None:
        """Record the seconds from a version's announcement until it could be loaded."""
        with self._lock:
            self._seconds[way].append(seconds)
            self._since_group = self._since_group + 1 if way == "store" else 0
            self.taken[way] += 1
        self._told(way, seconds)
        log.info("weights came by the %s in %.3f s", way, seconds, extra={"fields": {"way": way, "seconds": seconds}})

    def seconds(self, way: Way) -> float | None:
        with self._lock:
            return median(self._seconds[way]) if self._seconds[way] else None

    @property
    def wants_group(self) -> bool:
        if self._transfer != "auto":
            return self._transfer == "group"
        group, store = self.seconds("group"), self.seconds("store")
        with self._lock:
            if self._since_group >= AGAIN - 1 or self.taken["group"] < TRIALS:
                return True
        return group is None or store is None or group <= store
