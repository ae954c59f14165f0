"""Counts of skipped tests by reason, for the summary."""

from collections import Counter
from collections.abc import Iterable

import pytest


def by_reason(reports: Iterable[pytest.TestReport]) -> list[str]:
    reasons = Counter(r.longrepr[2].removeprefix("Skipped: ") for r in reports if isinstance(r.longrepr, tuple))
    return [f"{count} skipped: {reason}" for reason, count in sorted(reasons.items(), key=lambda each: -each[1])]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if lines := by_reason(terminalreporter.stats.get("skipped", [])):
        terminalreporter.section("tests that did not run, by reason")
        for line in lines:
            terminalreporter.write_line(line)
