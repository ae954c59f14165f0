"""A change chooses the tests that what changed can break, and no others."""

from __future__ import annotations

from pathlib import Path

import choose_tests
import grimp
import pytest
from choose_tests import Repository, choose
from places import ROOT

# b imports a, c imports b; d is alone; a command imports e when it is called.
# What is in tests/ leads there directly, through a helper, or through a fixture.
MODULES = {"rlhfspec.room.b": ["rlhfspec.room.a"], "rlhfspec.room.c": ["rlhfspec.room.b"], "rlhfspec.other.d": []}
MODULES |= {
    "rlhfspec.other.e": [],
    "rlhfspec.cli.main": ["rlhfspec.cli.show"],
    "rlhfspec.cli.show": ["rlhfspec.other.e"],
    "rlhfspec.bench.commands.weigh": ["rlhfspec.bench.scale"],  # main finds it by an entry point
    "rlhfspec.bench.scale": [],
}
PACKAGES = ("rlhfspec.room", "rlhfspec.other", "rlhfspec.cli", "rlhfspec.bench", "rlhfspec.bench.commands")
FILES = {
    "libs/rlhfspec/room/__init__.py": "",
    "libs/rlhfspec/room/a.py": "",
    "libs/rlhfspec/room/b.py": "",
    "libs/rlhfspec/room/c.py": "",
    "libs/rlhfspec/room/csrc/a.cpp": "",
    "libs/rlhfspec/other/d.py": "",
    "services/rlhfspec/cli/main.py": "from rlhfspec.cli import show\n",
    "services/rlhfspec/cli/show.py": "def show_it():\n    from rlhfspec.other import e\n",
    "bench/src/rlhfspec/bench/commands/weigh.py": "def weigh_it():\n    from rlhfspec.bench import scale\n",
    "bench/src/rlhfspec/bench/scale.py": "",
    "libs/rlhfspec/other/e.py": "",
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
    "tests/app.py": "from rlhfspec.cli import main\n",
    "tests/unit/cli/test_show.py": "import app\nCOMMAND = ['show-it']\n",
    "tests/unit/cli/test_other.py": "import app\nCOMMAND = ['hide-it']\n",
    "tests/unit/cli/test_weigh.py": "import app\nCOMMAND = ['weigh-it']\n",
    "tests/unit/cli/test_directly.py": "from rlhfspec.cli.show import show_it\n",
    "tests/runs/room/test_run.py": "import rlhfspec.room.a\ndef test_it(): ...\n",
}


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


ALL = {"a", "c", "helped", "made", "d", "show", "other", "weigh", "directly"}


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [
        ("libs/rlhfspec/room/a.py", {"a", "c", "helped", "made"}),
        ("libs/rlhfspec/room/b.py", {"c", "helped", "made"}),
        ("libs/rlhfspec/other/d.py", {"d"}),
        ("libs/rlhfspec/other/e.py", {"show", "directly"}),
        ("services/rlhfspec/cli/show.py", {"show", "other", "weigh", "directly"}),
        ("bench/src/rlhfspec/bench/commands/weigh.py", {"weigh"}),
        ("bench/src/rlhfspec/bench/scale.py", {"weigh"}),
        ("libs/rlhfspec/room/__init__.py", {"a", "c", "helped", "made"}),
        ("libs/rlhfspec/room/csrc/a.cpp", {"a", "c", "helped", "made"}),
        ("libs/rlhfspec/room/gone.py", set()),
        ("tests/helper.py", {"helped", "made"}),
        ("tests/second.py", {"helped"}),
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


def test_several_changes_choose_what_each_does(repository: Repository) -> None:
    assert chosen(repository, "tests/second.py", "libs/rlhfspec/other/d.py") == {"helped", "d"}


def test_one_line_says_which_and_why(repository: Repository) -> None:
    choice = choose(repository, map(Path, ["libs/rlhfspec/room/b.py", "tests/runs/room/test_run.py"]))
    assert str(choice) == (
        "3 test files, for libs/rlhfspec/room/b.py: torch/room: helped made; unit/room: c"
        "; the examples of 1 modules; left to make test: tests/runs/room/test_run.py"
    )
    assert choice.arguments[-2:] == ["tests/unit/room/test_c.py", f"{choose_tests.DOCSTRINGS}[rlhfspec.room.b]"]


def test_of_this_repository() -> None:
    """By the graph that `make test-fast` builds."""
    repository = Repository(ROOT, grimp.build_graph("rlhfspec", cache_dir=None))
    assert {"drafting/acceptance", "operator/operator_world"} <= {
        f"{path.parent.name}/{path.stem.removeprefix('test_')}" for path in repository.tests
    }
    assert chosen(repository, "operators/rlhfspec/operator/deciding/times.py") >= {
        "operator_reconcile",
        "operator_world",
    }
    assert "operator_world" not in chosen(repository, "libs/rlhfspec/engine/core.py")
    assert {"suffix", "selector"} <= chosen(repository, "libs/rlhfspec/engine/drafting/suffix.py"), "a table names it"
    native = chosen(repository, "kernels/rlhfspec/kernels/cpu/csrc/draft.cpp")
    assert {"draft_native", "engine", "cpu_build"} <= native
    assert "operator_world" not in native
    assert "losses" in chosen(repository, "tests/data/learning_numbers.json")
    assert (ROOT / choose_tests.DOCSTRINGS.split("::")[0]).exists()
