"""Sweeps: tests with many values of which each run takes a part, another one each day; `--whole` takes all.

A test that is marked `sweep(parts=3)` is run with a third of its values. Which third follows from the date (or from
the variable SWEEP, a number), so that a few days of runs have seen all, and so has one nightly `make test-whole`. Every
such test is run with some of its values in each run. A test that was named with its value (`test_it[value]`) is run.
Random examples are as many as `examples` says: few by default, and the same each day; many, drawn anew, nightly.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from zlib import crc32

import pytest
from hypothesis import settings

VARIABLE = "SWEEP"
DAY_SECONDS = 24 * 60 * 60


def part_of(num_values: int, parts: int, day: int) -> set[int]:
    """The places of the values that are taken that day: never none, and in so many days all of them.

    >>> part_of(7, 3, 0), part_of(7, 3, 1), part_of(2, 3, 2)
    ({0, 3, 6}, {1, 4}, {0})
    """
    parts = min(parts, num_values)
    return set(range(day % parts, num_values, parts))


def examples(few: int, *, whole: int) -> settings:
    """Return what decorates a test of hypothesis: so many examples, and in `make test-whole` so many more."""
    return settings(max_examples=whole if settings.get_current_profile_name() == "whole" else few)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="every value of the tests that are sweeps")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sweep(parts): each run takes one of so many parts of its values")
    # Workers of xdist get it from the one that starts them, and agree also at midnight.
    os.environ.setdefault(VARIABLE, str(int(time.time() // DAY_SECONDS)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--whole"):
        return
    named = {argument.split("::", 1)[-1] for argument in config.args if "[" in argument}
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") and item.nodeid.split("::", 1)[-1] not in named:
            sweeps[item.nodeid.split("[")[0]].append(item)
    day = int(os.environ[VARIABLE])
    left = set()
    for values in sweeps.values():
        [parts] = {item.get_closest_marker("sweep").kwargs["parts"] for item in values}  # type: ignore[union-attr]
        taken = part_of(len(values), parts, day)
        mixed = sorted(values, key=lambda item: crc32(item.name.encode()))  # else a part may be one of two types, say
        left |= {item for place, item in enumerate(mixed) if place not in taken}
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
