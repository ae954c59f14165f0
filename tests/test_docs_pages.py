"""The pages a reader meets first: the README is short, and the index leads to every page, in an order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlhfspec.cli.main import app

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
README = (ROOT / "README.md").read_text().splitlines()


def test_the_readme_is_short_and_starts_with_commands() -> None:
    assert len(README) <= 90
    first = next(number for number, line in enumerate(README, start=1) if line.startswith("make "))
    assert first < 25
    assert {"make demo", "make test"} <= {line.partition("  ")[0] for line in README}


def test_the_readme_shows_what_validate_prints() -> None:
    """But for the data, which may be on this machine or not."""
    printed = CliRunner().invoke(app, ["validate", str(ROOT / "examples" / "grpo.yaml")]).output
    lines = [line for line in printed.splitlines()[1:] if line and not line.startswith("  data")]
    assert len(lines) >= 5
    assert set(lines) <= set(README)


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_the_index_leads_to_every_page(page: Path) -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    assert page.name == "README.md" or f"({page.name})" in index


def test_the_index_says_what_to_read_first() -> None:
    steps = re.findall(r"^(\d+)\. \[[^\]]+\]\(([^)]+)\)", (ROOT / "docs" / "README.md").read_text(), re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, len(steps) + 1))
    assert [page for _, page in steps[:3]] == ["overview.md", "getting-started.md", "tutorial.md"]
