"""A change selects exactly the tests and slow suites that it can break."""

import subprocess
from pathlib import Path

import choose_tests
import grimp
import pytest
import suites
from choose_tests import Repository, choose
from places import ROOT
from suites import Suite

# b imports a, c imports b; d is alone. What is in tests/ leads there directly, through a helper, or through a fixture.
MODULES = {"rlhfspec.room.b": ["rlhfspec.room.a"], "rlhfspec.room.c": ["rlhfspec.room.b"], "rlhfspec.other.d": []}
PACKAGES = ("rlhfspec.room", "rlhfspec.other")
FILES = {
    "libs/rlhfspec/room/__init__.py": "",
    "libs/rlhfspec/room/a.py": "",
    "libs/rlhfspec/room/b.py": "",
    "libs/rlhfspec/room/c.py": "",
    "libs/rlhfspec/room/csrc/a.cpp": "",
    "libs/rlhfspec/other/d.py": "",
    "docs/d.md": "",
    "pyproject.toml": "",
    "tests/helper.py": "from rlhfspec.room import c\n",
    "tests/second.py": "import helper\n",
    "tests/conftest.py": (
        "import pytest\nfrom helper import thing\nimport rlhfspec.other.d\n"
        "@pytest.fixture\ndef made():\n    return thing()\n"
        "@pytest.fixture(scope='module')\ndef made_of_it(made):\n    return made\n"
        "@pytest.fixture\ndef plain():\n    return 1\n"
    ),
    "tests/unit/room/test_a.py": "from rlhfspec.room.a import x\nEMPTY = ''\ndef test_it(): ...\n",
    "tests/unit/room/test_c.py": "def test_it():\n    import rlhfspec.room.c\n",
    "tests/torch/room/test_helped.py": "import second\ndef test_it(): ...\n",
    "tests/torch/room/test_made.py": "def test_it(made_of_it): ...\n",
    "tests/torch/other/test_d.py": "import rlhfspec.other.d\nPAGE = 'd.md'\ndef test_it(plain): ...\n",
    "tests/runs/room/test_run.py": "import rlhfspec.room.a\ndef test_it(): ...\n",
}
ALL = {"a", "c", "helped", "made", "d"}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    graph = grimp.ImportGraph()
    for name in ("rlhfspec", "rlhfspec.room.a", *PACKAGES, *MODULES):
        graph.add_module(name)
    for name, imported in MODULES.items():
        for each in imported:
            graph.add_import(importer=name, imported=each)
    return Repository(tmp_path, graph)


def chosen(repository: Repository, *changed: str) -> set[str]:
    return {path.stem.removeprefix("test_") for path in choose(repository, map(Path, changed)).files}


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ("libs/rlhfspec/room/a.py", {"a", "c", "helped", "made"}),
        ("libs/rlhfspec/room/b.py", {"c", "helped", "made"}),
        ("libs/rlhfspec/other/d.py", {"d"}),
        ("libs/rlhfspec/room/__init__.py", {"a", "c", "helped", "made"}),
        ("libs/rlhfspec/room/csrc/a.cpp", {"a", "c", "helped", "made"}),
        ("libs/rlhfspec/room/gone.py", set()),
        ("tests/helper.py", {"helped", "made"}),
        ("tests/unit/room/test_c.py", {"c"}),
        ("tests/runs/room/test_run.py", set()),
        ("docs/d.md", {"d"}),
        ("README.md", set()),
        ("pyproject.toml", ALL),
        ("tests/conftest.py", ALL),
    ],
)
def test_what_a_change_chooses(repository: Repository, changed: str, wanted: set[str]) -> None:
    assert chosen(repository, changed) == wanted
    assert chosen(repository, changed, "tests/second.py") == wanted | {"helped"}


def test_of_this_repository() -> None:
    repository = Repository(ROOT, grimp.build_graph("rlhfspec", cache_dir=None))
    deciding = chosen(repository, "operators/rlhfspec/operator/deciding/reconcile.py")
    assert deciding >= {"operator_reconcile", "operator_world"}
    assert "operator_world" not in chosen(repository, "libs/rlhfspec/engine/core.py")
    assert {"suffix", "selector"} <= chosen(repository, "libs/rlhfspec/engine/drafting/suffix.py"), "a table names it"
    assert "losses" in chosen(repository, "tests/data/learning_numbers.json")
    assert (ROOT / choose_tests.DOCSTRINGS.split("::")[0]).exists()
    for name, suite in suites.SUITES.items():
        assert suite.is_nightly or name == "slow" or suite.files(ROOT), name


SUITE = Suite("it", tests=("tests/*/*/test_*.py",), text="def test_it", modules=("rlhfspec.other.d",), folders=("e/",))


@pytest.mark.parametrize(
    ("suite", "changed", "wanted"),
    [
        (Suite("all", tests=("tests/*/*/test_*.py",)), "libs/rlhfspec/room/b.py", {"c", "helped", "made", "run"}),
        (Suite("torch", tests=("tests/torch/*/test_*.py",)), "libs/rlhfspec/room/b.py", {"helped", "made"}),
        (Suite("all", tests=("tests/*/*/test_*.py",)), "services/rlhfspec/dashboard/pages.py", set()),
        (Suite("all", tests=("tests/*/*/test_*.py",)), "docs/d.md", set()),
        (SUITE, "libs/rlhfspec/room/b.py", {"c", "helped", "made"}),
        (SUITE, "libs/rlhfspec/other/d.py", ALL | {"run"}),
        (SUITE, "e/f", ALL | {"run"}),
        (SUITE, "constraints.txt", ALL | {"run"}),
    ],
)
def test_what_a_change_makes_due_of_a_suite(
    repository: Repository, suite: Suite, changed: str, wanted: set[str]
) -> None:
    due = suites.due_files(suite, repository, [Path(changed)])
    assert {path.stem.removeprefix("test_") for path in due} == wanted
    assert set(due.values()) <= {Path(changed)}


def test_a_suite_not_known_to_have_passed_is_due(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **how: subprocess.CompletedProcess([], 128, ""))
    monkeypatch.setitem(suites.SUITES, "it", SUITE)
    for passed in ("", "0123abcd"):
        assert len(suites.due("it", repository, passed)[0]) == len(ALL) + 1
    monkeypatch.setattr(subprocess, "run", lambda *_, **how: subprocess.CompletedProcess([], 0, "README.md\0"))
    assert suites.due("it", repository, "0123abcd") == ([], "nothing that it reaches has changed since 0123abcd")


def test_what_came_of_a_suite_is_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="7" skipped="2" failures="1" errors="1"/></testsuites>')
    assert suites.counts_of(report) == {"passed": 3, "skipped": 2, "failed": 2}
