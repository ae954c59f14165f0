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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not os.environ.get(VARIABLE):
        return
    import sweeps  # a plugin too: not before pytest takes it

    day = int(os.environ[sweeps.VARIABLE])
    others = sorted({item.path for item in items if not item.get_closest_marker("unit")})
    turn = {module: (place - day) % 3 for place, module in enumerate(others)}
    items.sort(key=lambda item: turn.get(item.path, -1))
