"""Programs are not persons, and docstrings of public modules are sentences: "Return ...", "Raise ..."."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

PERSONS = re.compile(r"\b(who|whom|whoever|nobody|somebody|everybody)\b", re.IGNORECASE)
# "nobody in production": persons, really
ABOUT_PERSONS = re.compile(r"who uses it|who signed it|nobody in production yet|readers who know")
PAGES = ("overview", "getting-started", "kubernetes", "job", "training", "engine", "failures")
LIBS, CLI = ROOT / "libs" / "rlhfspec", ROOT / "services" / "rlhfspec" / "cli"
PUBLIC = [
    *(LIBS / "engine" / f"{name}.py" for name in ("__init__", "base", "config", "core", "params")),
    *sorted((LIBS / "job").glob("*.py")),
]
NO_VERBS = {
    "a",
    "all",
    "another",
    "an",
    "between",
    "by",
    "does",
    "has",
    "how",
    "in",
    "is",
    "no",
    "of",
    "on",
    "one",
    "that",
}
NO_VERBS |= {"the", "those", "what", "when", "where", "whether", "which", "whose", "with"}


def prose_of(page: str) -> str:
    """Without what is shown literally: commands, outputs, messages, and places that links lead to."""
    text = re.sub(r"```.*?```", "", (ROOT / "docs" / f"{page}.md").read_text(), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", "", text)
    return re.sub(r"\]\([^)]*\)", "]", text)


def docstrings_of(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            if said:
                yield node, said


@pytest.mark.parametrize("page", PAGES)
def test_a_page_speaks_of_programs_as_programs(page: str) -> None:
    found = PERSONS.search(ABOUT_PERSONS.sub("", prose_of(page)))
    assert found is None, f"docs/{page}.md: {found.group() if found else ''}; see the glossary in CONTRIBUTING"


@pytest.mark.parametrize(
    "path", [*PUBLIC, *sorted(CLI.glob("*.py"))], ids=lambda path: f"{path.parent.name}/{path.name}"
)
def test_a_docstring_speaks_of_programs_as_programs(path: Path) -> None:
    for node, said in docstrings_of(path):
        assert not PERSONS.search(said), f"{getattr(node, 'name', path.name)}: {said}"


@pytest.mark.parametrize("path", PUBLIC, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_docstring_of_a_public_function_begins_with_its_verb(path: Path) -> None:
    for node, said in docstrings_of(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            first = re.match(r"[A-Za-z'-]*", said)
            word = first.group().lower() if first else ""
            assert word not in NO_VERBS, f"{node.name}: {said}"
            assert not word.endswith("s") or word in {"process", "pass"}, f"{node.name}: {said}"
