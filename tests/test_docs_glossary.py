"""The glossary of CONTRIBUTING: one name, one meaning, on one page."""

from __future__ import annotations

from pathlib import Path

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())


def test_the_glossary_has_each_word_once_in_order_on_one_page() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## Glossary\n")[2].partition("\n## ")[0]
    words = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")][1:]
    each = [word for words_of_a_row in words for word in words_of_a_row.split(", ")]
    assert len(each) == len(set(each)) >= 30
    assert words == sorted(words, key=str.lower)
    assert len(text.splitlines()) <= 60
    assert {"job", "run", "step", "sample", "sequence", "move", "stage", "role", "worker"} <= set(each)
