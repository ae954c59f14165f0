"""Counts of calls, a machine-independent measure of cost."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def counting_calls() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the number of calls, of Python and C functions, in this thread so far.

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
