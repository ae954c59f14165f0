"""House rules find planted faults, a change selects the tests that it can break, and walks are counted."""

import subprocess
from pathlib import Path

import choose_tests
import grimp
import house
import pytest
import suites
from choose_tests import Repository, choose
from house import House
from places import ROOT, TESTS
from suites import Suite
from tiers import TIERS
from walks import WALKS, CallGraph

# A house in order: each plant below puts one thing out of it.
IN_ORDER = {
    "libs/rlhfspec/engine/__init__.py": "",
    "libs/rlhfspec/engine/core.py": "from rlhfspec.engine import cache\n",
    "libs/rlhfspec/engine/cache.py": "try:\n    pass\nexcept ValueError:\n    pass\n",
    "services/rlhfspec/cli/__init__.py": "",
    "services/rlhfspec/cli/start.py": "def main() -> None: ...\n",
    "tests/unit/engine/test_core.py": "def test_core() -> None: ...\n",
    "docs/job.md": "See [the engine](engine.md) and [Python](https://python.org).\n\n`rlhfspec run`, `make test`\n",
    "docs/engine.md": "```bash\nmake test check    # both\nrlhfspec bench generate\n```\n",
    "CONTRIBUTING.md": "# C\n\n```\nlibs/rlhfspec/engine/ it\nservices/rlhfspec/cli/ that\n```\n",
    "Makefile": "check:\ntest:  ## All\n",
    "pyproject.toml": 'dependencies = ["numpy>=2.0", "types-pyyaml"]\n',
    "constraints.txt": "numpy==2.3.1\n",
}
CORE = "libs/rlhfspec/engine/core.py"
LONG_FUNCTION = "x = 1\ndef long():\n" + "    pass\n" * 60


def of(folder: Path, changed: dict[str, str]) -> House:
    files = IN_ORDER | changed
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return House(folder, tuple(Path(name) for name in sorted(files)))


PLANTED = {
    "root-is-a-package": ("libs/rlhfspec/__init__.py", "", 1, "would hide the other roots"),
    "in-two-roots": ("kernels/rlhfspec/engine/__init__.py", "", 1, "lies in kernels/rlhfspec/engine too"),
    "no-init": ("libs/rlhfspec/engine/links/shm.py", "", 1, "no __init__.py"),
    "long-file": (CORE, "x = 1\n" * 451, 450, "has 451 lines, 450 are allowed"),
    "long-test": ("tests/unit/engine/test_core.py", "def test_core() -> None: ...\n" * 601, 600, "has 601 lines"),
    "long-function": (CORE, LONG_FUNCTION, 2, "long has 61 lines, 60 are allowed"),
    "no-tests": ("tests/unit/engine/test_core.py", "def tes_core() -> None: ...\n", 1, "nothing here would be"),
    "no-contract": ("tests/unit/engine/test_core.py", "class TestCore(Base): ...\n", 1, "nothing here would be"),
    "no-tier": ("tests/test_core.py", "def test_core() -> None: ...\n", 1, "belongs into tests/TIER/ROOM"),
    "no-room": ("tests/unit/test_core.py", "def test_core() -> None: ...\n", 1, "belongs into tests/TIER/ROOM"),
    "as-if-a-person": ("services/rlhfspec/cli/start.py", "# a process who waits\n", 1, "who: name the program"),
    "nobody": ("services/rlhfspec/cli/start.py", "\nwaits = 'for nobody'\n", 2, "nobody: name the program"),
    "riddle": (CORE, '"""Of one layer."""\n', 1, "a sentence begins with Of"),
    "riddle-in-a-page": ("docs/job.md", "# What it is\n\nIt runs. What it runs is a job.\n", 3, "begins with What"),
    "long-documents": ("docs/job.md", "word " * 40_001, 1, "the documents have 40,0"),
    "dead-link": ("docs/job.md", "\n[it](nowhere.md#there)\n", 2, "nowhere.md does not exist"),
    "no-target": ("docs/job.md", "# Job\n\n`make tests`\n", 3, "make tests is no target"),
    "tree-shows-nothing": (
        "CONTRIBUTING.md",
        "\n```\nlibs/rlhfspec/engine/ it\nservices/rlhfspec/cli/\nlibs/gone.py no\n```\n",
        5, "shows libs/gone.py",
    ),
    "tree-lacks": ("CONTRIBUTING.md", "```\nlibs/rlhfspec/engine/ it\n```\n", 1, "does not show the package cli"),
    "unpinned": ("pyproject.toml", '\ndependencies = ["nunpy>=2.0"]\n', 2, "nunpy has no exact version"),
    "machine": ("docs/job.md", "\nin /" + "home/me\n", 2, "is a path of one machine"),
    "broad-except": (CORE, "try:\n    pass\nexcept Exception:\n    pass\n", 3, "catches Exception"),
    "pickle": (CORE, "import pickle\n", 1, "pickle would run code"),
    "pickle-by-name": (CORE, "from pickle import loads\n", 1, "pickle would run code"),
    "pickle-by-pipe": (CORE, "from multiprocessing import Pipe\n", 1, "multiprocessing would run code"),
    "torch-load": (CORE, "torch.load(path, map_location='cpu')\n", 1, "torch.load without weights_only=True"),
    "torch-load-unsafe": (CORE, "torch.load(path, weights_only=False)\n", 1, "torch.load without weights_only=True"),
    "numpy-load": (CORE, "numpy.load(path, allow_pickle=True)\n", 1, "allow_pickle would run code"),
    **{
        name: (CORE, f"dist.{name}([], src=0)\n", 1, f"{name} would run code")
        for name in ("broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list")
    },
    "bare-except": (CORE, "try:\n    pass\nexcept:\n    pass\n", 3, "catches everything"),
}  # fmt: skip


TOLD_AT = {"long-documents": "docs", "in-two-roots": "libs/rlhfspec/engine", "no-init": "libs/rlhfspec/engine/links"}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_reported_with_its_place(tmp_path: Path, plant: str) -> None:
    path, text, line, words = PLANTED[plant]
    [fault] = house.faults_of(of(tmp_path, {path: text}))
    assert (str(fault.path), fault.line) == (TOLD_AT.get(plant, path), line)
    assert words in fault.words


NAMED = "class Cache: ...\nclass _Row: ...\nWAIT = 2\nclass Again:\n    WAIT = 1\n"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("class Cache: ...\n", 1),
        ("x = 1\nclass _Row: ...\n", 2),
        ("def f():\n    class Cache: ...\n", 2),
        ("WAIT: int = 3\n", 1),
        ("BOTH, WAIT = 2, 3\n", 1),
        ("WAIT = 2\n", 0),
        ("_WAIT = wait = 3\ndef f():\n    WAIT = 3\n", 0),
        ("from rlhfspec.engine.core import Cache, WAIT\n", 0),
    ],
)
def test_a_repeated_class_name_or_differing_constant_is_a_fault(tmp_path: Path, text: str, line: int) -> None:
    """Line 0 means no fault."""
    faults = house.faults_of(of(tmp_path, {CORE: NAMED, "services/rlhfspec/cli/start.py": text}))
    assert [fault.line for fault in faults] == ([line] if line else [])
    assert all(CORE in fault.words for fault in faults)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        (CORE, IN_ORDER[CORE]),
        ("services/rlhfspec/cli/start.py", "# for the person who started it, and users who may\n# whose\n"),
        ("tests/unit/engine/test_core.py", "class TestCore(EngineContract): ...\n"),
    ],
)
def test_allowed_code_is_no_fault(tmp_path: Path, path: str, text: str) -> None:
    assert house.faults_of(of(tmp_path, {path: text})) == []


@pytest.mark.parametrize(
    "back",
    [
        "from rlhfspec.engine.core import step\n",
        "def f():\n    from rlhfspec.engine import core\n",
        "if TYPE_CHECKING:\n    import rlhfspec.engine.core\n",
    ],
)
def test_an_import_cycle_is_found_whatever_the_import_form(tmp_path: Path, back: str) -> None:
    [fault] = house.faults_of(of(tmp_path, {"libs/rlhfspec/engine/cache.py": back}))
    assert fault.words == "a circle of imports: rlhfspec.engine.cache, rlhfspec.engine.core"


def test_separate_import_cycles_are_reported_separately() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}
    assert house.circles_of(imports) == {frozenset("abc"), frozenset("ef")}
    assert house.circles_of(imports | {"c": set(), "f": set()}) == set()


def test_tiers_match_the_test_folders() -> None:
    assert tuple(TIERS) == house.TIERS
    assert {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))} == set(TIERS)


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
def test_a_change_selects_the_tests_that_reach_it(repository: Repository, changed: str, wanted: set[str]) -> None:
    assert chosen(repository, changed) == wanted
    assert chosen(repository, changed, "tests/second.py") == wanted | {"helped"}


def test_changes_in_this_repository_select_the_right_tests() -> None:
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
def test_a_change_makes_tests_of_it_due(repository: Repository, suite: Suite, changed: str, wanted: set[str]) -> None:
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
    changed = "libs/rlhfspec/other/d.py"
    said = {"diff": f"README.md\0{changed}\0", "show": ""}
    monkeypatch.setattr(subprocess, "run", lambda to, **how: subprocess.CompletedProcess([], 0, said[to[1]]))
    for text, is_due in (('"""What it is."""\n\n# nothing\n', False), ("x = 1\n", True)):
        (repository.root / changed).write_text(text)
        assert bool(suites.due("it", repository, "0123abcd")[0]) == is_due


def test_outcomes_of_a_suite_are_counted(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite tests="7" skipped="2" failures="1" errors="1"/></testsuites>')
    assert suites.counts_of(report) == {"passed": 3, "skipped": 2, "failed": 2}


TREE = {
    "base.py": "class Store(Protocol):\n    def put(self): ...\n",
    "file.py": "class FileStore:\n    def put(self): ...\n",
    "part.py": "from rlhfspec.base import Store\nclass Part:\n    def __init__(self, store: Store):\n"
    "        self._store = store\n    def keep(self):\n        self._store.put()\n",
    "main.py": "from rlhfspec.part import Part\ndef run():\n    part = Part(None)\n    part.keep()\ndef idle(): ...\n",
}


def test_a_chain_follows_imports_types_and_protocols(tmp_path: Path) -> None:
    folder = tmp_path / "libs" / "rlhfspec"
    folder.mkdir(parents=True)
    for name, text in TREE.items():
        (folder / name).write_text(text)
    graph = CallGraph(tmp_path)
    chain = graph.chain(graph.find("main.run"), graph.find("FileStore.put"))
    assert [graph.files[name].name for name in chain] == ["main.py", "part.py", "file.py"]
    with pytest.raises(SystemExit, match="no chain"):
        graph.chain(graph.find("main.idle"), graph.find("FileStore.put"))


def test_every_documented_walk_has_a_call_chain() -> None:
    graph = CallGraph(ROOT)
    for legs in WALKS.values():
        for first, last in legs:
            assert graph.chain(graph.find(first), graph.find(last))
