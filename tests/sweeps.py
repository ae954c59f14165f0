"""Selection of slow tests: `make test-whole` runs everything, a usual run a part that the commit determines.

`sweep(parts=3)` runs a third of a test's values, `turns(parts=3)` a third of a module's tests. `whole("why")`
leaves the test out. `--whole` or naming a test (`test_it[value]`, `file.py::test_it`) runs it. `examples` sets the
number of random examples.
"""

import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from hypothesis import settings

VARIABLE = "SWEEP"
_LEFT = pytest.StashKey[Counter[str]]()


def part_of(num_values: int, parts: int, seed: int) -> set[int]:
    """Return the chosen places: at least one, and all over successive seeds.

    >>> part_of(7, 3, 0), part_of(7, 3, 1), part_of(2, 3, 2)
    ({0, 3, 6}, {1, 4}, {0})
    """
    parts = min(parts, num_values)
    return set(range(seed % parts, num_values, parts))


def seed_of_commit() -> int:
    """Return a number derived from the commit, or 0 without git."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return int(done.stdout[:8], 16)


def examples(few: int, *, whole: int) -> settings:
    """Return hypothesis settings with `few` examples, or `whole` in `make test-whole`."""
    return settings(max_examples=whole if settings.get_current_profile_name() == "whole" else few)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--whole", action="store_true", help="all values of sweeps, and tests that are slow")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sweep(parts): each run takes one of so many parts of its values")
    config.addinivalue_line("markers", "turns(parts): each run takes one of so many parts of the module's tests")
    config.addinivalue_line("markers", "whole(reason): slow by construction, and left to make test-whole")
    config.stash[_LEFT] = Counter()
    os.environ.setdefault(VARIABLE, str(seed_of_commit()))  # workers of xdist inherit it


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--whole"):
        return
    named = {argument.split("::", 1)[-1] for argument in config.args if "::" in argument}
    sweeps: dict[str, list[pytest.Item]] = defaultdict(list)
    modules: dict[str, dict[str, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    left = set()
    for item in items:
        name = item.nodeid.split("::", 1)[-1]
        if name in named:
            continue
        if (marker := item.get_closest_marker("whole")) and name.split("[")[0] not in named:
            config.stash[_LEFT][marker.args[0]] += 1
            left.add(item)
        elif item.get_closest_marker("sweep"):
            sweeps[item.nodeid.split("[")[0]].append(item)
        if item.get_closest_marker("turns") and name.split("[")[0] not in named:
            modules[item.nodeid.split("::")[0]][name.split("[")[0]].append(item)
    seed = int(os.environ[VARIABLE])
    for values in sweeps.values():
        left.update(_left_of({item.name: [item] for item in values}, "sweep", seed))
    for tests in modules.values():
        left.update(_left_of(tests, "turns", seed_of_turns(seed)))
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]


def seed_of_turns(seed: int) -> int:
    """Return a seed independent of the sweeps', else a test's turn would always come with the same of its values."""
    return crc32(str(seed).encode())


def _left_of(items: dict[str, list[pytest.Item]], mark: str, seed: int) -> Iterator[pytest.Item]:
    """Yield the items that are not of the part that the commit says."""
    markers = (item.get_closest_marker(mark) for each in items.values() for item in each)
    [parts] = {marker.kwargs["parts"] for marker in markers if marker}
    mixed = sorted(items, key=lambda name: crc32(name.encode()))  # else a part may be one of two types, say
    taken = part_of(len(mixed), parts, seed)
    return (item for place, name in enumerate(mixed) if place not in taken for item in items[name])


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output["left"] = dict(session.config.stash[_LEFT])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take an xdist worker's counts; each has collected all tests."""
    node.config.stash[_LEFT] = Counter(getattr(node, "workeroutput", {}).get("left", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash[_LEFT]:
        terminalreporter.section(f"{left.total()} tests left to make test-whole, by reason")
        for reason, count in left.most_common():
            terminalreporter.write_line(f"{count} left: {reason}")
