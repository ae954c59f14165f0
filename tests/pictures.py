"""Runs of tests end without their picture, which takes matplotlib longer to draw than a small model to be trained.

In its place stands an empty file. It is drawn where a test or a module says `@pytest.mark.draws` (as the examples do,
which have among them every panel), and by processes that are started as a shell starts them (`warmed` tells which).
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
from warmed import DRAWS_AT_THE_END, leave_empty


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "draws: its runs end with the picture that users get")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("runs") and not item.get_closest_marker("draws"):
            patch.setattr(DRAWS_AT_THE_END, leave_empty)
        return (yield)
