"""A run of tests that has to end by a given time: what it has not come to by then is skipped, and counted as that.

`TESTS_UNTIL`, in seconds as of `date +%s`, is set by what has no more time than that, as a continuous integration whose
machine may be half as quick as another. Without it all tests run.
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
