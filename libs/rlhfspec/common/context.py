"""Context variables that have a value for the length of a block."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

T = TypeVar("T")


@contextmanager
def holding(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give the variable this value inside the block, for the block's context and thread alone."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
