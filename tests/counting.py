"""What code does, counted: as good as a clock to see that something is cheap, and the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def counting_calls() -> Iterator[Callable[[], float]]:
    """How many functions this thread has called by now, Python's and those written in C.

    >>> with counting_calls() as calls:
    ...     before = calls()
    ...     values = sorted([3, 1, 2])
    ...     num_calls = calls() - before
    >>> num_calls  # sorted and calls
    2.0
    """
    num_calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        yield lambda: float(num_calls)
    finally:
        sys.setprofile(None)
