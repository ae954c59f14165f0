"""Interface of reward sources, and validation of rewards."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol

from rlhfspec.errors import RLHFSpecError
from rlhfspec.messages.records import Sample


class CallFailed(RLHFSpecError):
    """Error of a source's call. Temporary ones are retried after `wait_seconds` or more."""

    def __init__(
        self, problem: str, *, temporary: bool, wait_seconds: float = 0.0, cause: BaseException | None = None
    ) -> None:
        self.problem = problem
        self.temporary = temporary
        self.wait_seconds = wait_seconds
        self.__cause__ = cause
        super().__init__(problem)


Reward = float | CallFailed  # a failure is a value, so that other samples keep their rewards
Around = Callable[[], AbstractContextManager[object]]  # entered around each call, in the thread that runs it


class Rewarder(Protocol):
    """Reward source, whose caller applies deadline, retries and concurrency.

    Rewards must depend on the sample alone, or on its prompt group if `grouped`, never on timing or batching.
    """

    @property
    def grouped(self) -> bool:
        """Return whether `rewards` takes a prompt's sorted samples instead of one sample."""
        ...

    async def start(self) -> None: ...

    async def rewards(self, samples: Sequence[Sample], around: Around = nullcontext) -> list[Reward]:
        """Return a finite number or failure per sample, each call inside `around()`. Raise CallFailed if all fail."""
        ...

    async def close(self) -> None: ...


def number(value: Any, of: str) -> float:
    """Convert a scalar of Python, numpy or torch to a finite float, or raise CallFailed about `of`."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise CallFailed(f"{of} is {describe(value)}, not a number", temporary=False)
    try:
        result = float(value)
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise CallFailed(f"{of} is {result}, not a finite number", temporary=False)
    return result


def numbers_of(values: Any, samples: Sequence[Sample]) -> list[Reward]:
    if hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise CallFailed(f"it returned {describe(values)}, not a list of {len(samples)} numbers", temporary=False)
    if len(values) != len(samples):
        raise CallFailed(f"it returned {len(values)} rewards for {len(samples)} samples", temporary=False)
    return [_number_or_failure(value) for value in values]


def _number_or_failure(value: Any) -> Reward:
    try:
        return number(value, "what it returned")
    except CallFailed as failure:
        return failure


def describe(value: object) -> str:
    """Describe a value briefly.

    >>> describe(None), describe("good"), describe([0.5] * 100)
    ('None', "'good' (str)", 'a list of length 100')
    """
    if value is None:
        return "None"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of length {len(value)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def columns_of(sample: Sample) -> dict[str, Any]:
    """Return the sample's data columns as a new dictionary."""
    columns: dict[str, Any] = json.loads(sample.columns_json)
    return columns


Combination = Literal["sum", "min", "product"]


def combine(how: Combination, weights: Sequence[float], components: Sequence[float]) -> float:
    weighted = [weight * component for weight, component in zip(weights, components, strict=True)]
    if how == "min":
        return min(weighted)
    return math.prod(weighted) if how == "product" else sum(weighted)
