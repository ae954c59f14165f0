"""Verdicts of load-time proofs and measured costs, kept for one session of tests in the rooms of `ROOMS`, also by the
processes that they start: there a model is proved once per class, configuration and weights. A test that is about the
proof, or whose code is not what was proved, is marked `proves_anew`."""

import os
import shutil
import tempfile
from collections.abc import Generator

import pytest

ROOMS = (
    "bench", "choices", "cli", "control", "distilling", "engine", "generator", "learning", "loop", "migration",
    "planning", "rebalancer", "runs", "scoring", "stage", "supervisor", "telemetry", "trainer", "weights",
)  # fmt: skip
FOLDER = "TESTS_KEPT"  # workers of xdist inherit it


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "proves_anew: what it loads is proved at every load")
    if FOLDER not in os.environ:
        os.environ[FOLDER] = folder = tempfile.mkdtemp(prefix="kept-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop(FOLDER, None))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    is_one = any(item.get_closest_marker(tier) for tier in ("torch", "runs")) and item.path.parent.name in ROOMS
    is_one = is_one and not item.get_closest_marker("proves_anew")
    with pytest.MonkeyPatch.context() as patch:
        if is_one:
            patch.setenv("RLHFSPEC_KEPT", os.environ[FOLDER])
        return (yield)
