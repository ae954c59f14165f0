"""Restoration of environment variables after each test, as later processes would import anew (warmed.py)."""

import os
from collections.abc import Generator

import pytest
from warmed import read_by_imports


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    before = read_by_imports(os.environ)
    try:
        return (yield)
    finally:
        for name in read_by_imports(os.environ).keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
