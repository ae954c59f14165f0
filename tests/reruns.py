"""A test that failed and is run again (`--reruns`) has its module's fixtures made anew: a whole run is often one of
them, and may be what failed."""

from __future__ import annotations

from collections.abc import Generator

import pytest

_FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[_FAILED] = report.failed or item.stash.get(_FAILED, False)
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Before pytest-rerunfailures, which keeps what is of more than one test."""
    has_failed, item.stash[_FAILED] = item.stash.get(_FAILED, False), False
    module = item.getparent(pytest.Module)
    if has_failed and module and item.config.getoption("reruns", None):
        item.session._setupstate.teardown_exact(module.parent)  # type: ignore[arg-type]
