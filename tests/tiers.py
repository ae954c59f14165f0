"""Tiers of tests: the folder tests/TIER/ROOM/ says what a test may need; ROOM is the package under test.
The tier is also a marker (`pytest -m "unit or torch"`). A test that needs more than its tier allows fails.
"""

import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from places import TESTS

TIERS = {
    "unit": "neither torch nor another process",
    "torch": "imports torch; no other process",
    "processes": "starts processes",
    "servers": "needs NATS, Redis, an object store, a Kubernetes API or another HTTP server",
    "runs": "whole runs of jobs",
}
ALONE = ("unit", "torch")  # in the process of pytest
# What builds kernels, tells the machine, and finds fonts the first time on it.
TOOLS = {"c++", "cc", "clang++", "g++", "gcc", "ld", "ldconfig", "lscpu", "uname", "fc-list"}
_running = ""  # the tier of the test that runs


def tier_of(path: Path) -> str:
    """Return the tier of a path, or "" for tests of e2e/.

    >>> tier_of(TESTS / "unit" / "drafting" / "test_suffix.py")
    'unit'
    """
    tier = path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""
    return tier if tier in TIERS else ""


def pytest_configure(config: pytest.Config) -> None:
    for tier, needs in TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {needs}")
    sys.addaudithook(_refuse_processes)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if tier := tier_of(item.path):
            item.add_marker(tier)
        elif item.path.is_relative_to(TESTS):
            raise pytest.UsageError(f"{item.path} is in none of {', '.join(TIERS)}: see tests/tiers.py")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    global _running
    _running = tier_of(item.path)
    try:
        return (yield)
    finally:
        _running = ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    had_torch = "torch" in sys.modules
    result = yield
    if tier_of(item.path) == "unit" and not had_torch and "torch" in sys.modules:
        pytest.fail("a unit test imported torch: it belongs to tests/torch", pytrace=False)
    return result


def _refuse_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in ("subprocess.Popen", "os.fork") or _running not in ALONE:
        return
    command = [str(word) for word in arguments[1]] if event == "subprocess.Popen" else ["a copy of itself"]
    if Path(command[0]).name not in TOOLS:
        raise AssertionError(f"a {_running} test starts {command[0]}: it belongs to tests/processes")
