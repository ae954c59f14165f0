"""A run of tests that has to end by a given time: what it has not come to by then is skipped, and counted as that.

`TESTS_UNTIL`, in seconds as of `date +%s`, is set by what has no more time than that, as a continuous integration whose
machine may be half as quick as another. Without it all tests run. With it unit tests, which are quick, come first, and
behind them another third of the other modules each day: where there is time for that, three days of runs have seen all.
"""

from __future__ import annotations

import os
import time

import pytest

VARIABLE = "TESTS_UNTIL"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Before a test's fixtures, which may be a whole run."""
    if (until := os.environ.get(VARIABLE)) and time.time() > float(until):
        pytest.skip("the time for tests was over")


def turned(modules: list[str], day: int) -> list[str]:
    """The order of a day.

    >>> turned(["tests/torch/a", "tests/runs/b", "tests/unit/c", "tests/runs/d", "tests/torch/e"], 1)
    ['tests/unit/c', 'tests/runs/d', 'tests/torch/a', 'tests/runs/b', 'tests/torch/e']
    """
    quick = [module for module in modules if "/unit/" in module]
    others = sorted(set(modules) - set(quick))
    thirds = [others[(day + later) % 3 :: 3] for later in range(3)]
    return quick + [module for third in thirds for module in third]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(VARIABLE):
        import sweeps  # a plugin too: not before pytest takes it

        modules = list(dict.fromkeys(str(item.path) for item in items))
        place = {module: place for place, module in enumerate(turned(modules, int(os.environ[sweeps.VARIABLE])))}
        items.sort(key=lambda item: place[str(item.path)])
