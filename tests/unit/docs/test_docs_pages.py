"""The README shows real output, and the docs index links every page."""

from places import ROOT
from typer.testing import CliRunner

from rlhfspec.cli.main import app


def test_the_readme_shows_what_validate_prints() -> None:
    """Lines on the data are excepted, as it may be absent."""
    readme = (ROOT / "README.md").read_text().splitlines()
    printed = CliRunner().invoke(app, ["validate", str(ROOT / "examples" / "grpo.yaml")]).output
    lines = [line for line in printed.splitlines()[1:] if line and not line.startswith("  data")]
    assert len(lines) >= 5
    assert set(lines) <= set(readme)


def test_the_index_leads_to_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert not {page for page in pages if f"({page})" not in index}
