"""Who takes one version from whom, so that the trainer's link carries it once and not once for each receiver.

The first who asks takes it from the trainer, each next from the newest of those before it that feeds nobody yet: a
chain, in which every link carries the version once, and all of it flows at the same time. Nobody ever takes from
somebody who asked later, so there is no circle, whatever is lost meanwhile.

Example:
    >>> fanout = Fanout()
    >>> [fanout.source(who) for who in ("a:1", "b:1", "c:1")]
    [None, 'a:1', 'b:1']
    >>> fanout.source("c:1", lost=["b:1"]), fanout.source("d:1")
    ('a:1', 'c:1')
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection


class Fanout:
    """Of one version. None stands for who put it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers: dict[str, int] = {}  # in the order in which they first asked
        self._sources: dict[str, str | None] = {}
        self._lost: set[str] = set()

    def source(self, receiver: str, *, lost: Collection[str] = ()) -> str | None:
        """`receiver`: its address, empty when it serves nobody. `lost`: from whom it could not take it."""
        with self._lock:
            self._lost.update(self._numbers.keys() & set(lost))
            self._lost.discard(receiver)  # it speaks
            number = self._numbers.setdefault(receiver, len(self._numbers)) if receiver else len(self._numbers)
            fed = Counter(self._sources.values())
            before = [peer for peer, other in self._numbers.items() if other < number and peer not in self._lost]
            chosen = min(before, key=lambda peer: (fed[peer], -self._numbers[peer]), default=None)
            if receiver:
                self._sources[receiver] = chosen
            return chosen
