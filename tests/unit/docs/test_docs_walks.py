"""The walks of CONTRIBUTING.md name files that exist, each once, as many as they say."""

from __future__ import annotations

import re

import pytest
from places import ROOT

ROWS = re.findall(r"^\| ([^|]+) \| (\d+) \| (`[^|]+`) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)


def paths_of(which: str) -> list[str]:
    """
    >>> paths_of("`a/{b,c}.py`, `d.py`")
    ['a/b.py', 'a/c.py', 'd.py']
    """
    found = []
    for pattern in re.findall(r"`([^`]+)`", which):
        before, names, after = re.fullmatch(r"([^{]*)\{?([^}]*)\}?(.*)", pattern).groups()
        found += [before + name + after for name in names.split(",")]
    return found


@pytest.mark.parametrize(("_", "stated", "which"), ROWS, ids=[row[0] for row in ROWS])
def test_a_walk_is_as_long_as_it_says(_: str, stated: str, which: str) -> None:
    paths = paths_of(which)
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert len(set(paths)) == len(paths) == int(stated)


def test_both_walks_are_read() -> None:
    assert len(ROWS) == 2
