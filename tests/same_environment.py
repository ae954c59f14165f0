"""What a test, or what it imports, tells later imports by the environment is forgotten behind it.

A library that sets a variable at its first use would else make every process of all later tests in the same worker one
that imports for itself (warmed.py), and their results depend on which tests came before.
"""

from __future__ import annotations

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
