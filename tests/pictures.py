"""Replacement of run pictures by empty files, as drawing is slow; `@pytest.mark.draws` draws them."""

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
