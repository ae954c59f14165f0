"""The rules of the house see what is planted, and say where it is."""

from __future__ import annotations

from pathlib import Path

import house
import pytest
from house import House
from places import TESTS
from tiers import TIERS

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


def test_a_house_in_order_has_no_fault(tmp_path: Path) -> None:
    assert house.faults_of(of(tmp_path, {})) == []


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
    "dead-link": ("docs/job.md", "\n[it](nowhere.md#there)\n", 2, "nowhere.md does not exist"),
    "no-target": ("docs/job.md", "# Job\n\n`make tests`\n", 3, "make tests is no target"),
    "no-command": ("docs/job.md", "\n```bash\nrlhfspec rum job.yaml\n```\n", 3, "no command rlhfspec rum"),
    "tree-shows-nothing": (
        "CONTRIBUTING.md",
        "\n```\nlibs/rlhfspec/engine/ it\nservices/rlhfspec/cli/\nlibs/gone.py no\n```\n",
        5, "shows libs/gone.py",
    ),
    "tree-lacks": ("CONTRIBUTING.md", "```\nlibs/rlhfspec/engine/ it\n```\n", 1, "does not show the package cli"),
    "unpinned": ("pyproject.toml", '\ndependencies = ["nunpy>=2.0"]\n', 2, "nunpy has no exact version"),
    "machine": ("docs/job.md", "\nin /" + "home/me\n", 2, "is a path of one machine"),
    "broad-except": (CORE, "try:\n    pass\nexcept Exception:\n    pass\n", 3, "catches Exception"),
    "bare-except": (CORE, "try:\n    pass\nexcept:\n    pass\n", 3, "catches everything"),
}  # fmt: skip


TOLD_AT = {"in-two-roots": "libs/rlhfspec/engine", "no-init": "libs/rlhfspec/engine/links"}


@pytest.mark.parametrize("plant", PLANTED)
def test_a_planted_fault_is_told_with_its_place(tmp_path: Path, plant: str) -> None:
    path, text, line, words = PLANTED[plant]
    [fault] = house.faults_of(of(tmp_path, {path: text}))
    assert (str(fault.path), fault.line) == (TOLD_AT.get(plant, path), line)
    assert words in fault.words


def test_the_first_hall_has_no_more_names_than_a_newcomer_reads(tmp_path: Path) -> None:
    names = [f"room_{number}" for number in range(house.MOST_NAMES_IN_THE_FIRST_HALL - 1)]
    rooms = {f"libs/rlhfspec/{name}/__init__.py": "" for name in names}
    tree = "```\n" + "".join(f"libs/rlhfspec/{name}/\n" for name in ("engine", *names, "cli")) + "```\n"
    planted = of(tmp_path, {**rooms, "CONTRIBUTING.md": tree})
    assert not list(house.the_first_hall_is_small(planted))
    [fault] = house.the_first_hall_is_small(of(tmp_path, {**rooms, "libs/rlhfspec/one_more.py": ""}))
    assert fault.words == "has 15 names side by side, 14 are allowed: give them a room"


@pytest.mark.parametrize(
    ("path", "text", "line", "words"),
    [
        (
            "services/rlhfspec/cli/start.py",
            "class Cache: ...\n",
            1,
            "the class Cache is in libs/rlhfspec/engine/core.py too",
        ),
        (
            "services/rlhfspec/cli/start.py",
            "x = 1\nclass _Row: ...\n",
            2,
            "the class _Row is in libs/rlhfspec/engine/core.py too",
        ),
        (
            "services/rlhfspec/cli/start.py",
            "def f():\n    class Cache: ...\n",
            2,
            "the class Cache is in libs/rlhfspec/engine/core.py too",
        ),
        (
            "services/rlhfspec/cli/start.py",
            "WAIT = 3\n",
            1,
            "the constant WAIT has another value in libs/rlhfspec/engine/core.py",
        ),
        ("services/rlhfspec/cli/start.py", "WAIT: int = 3\n", 1, "the constant WAIT has another value in libs"),
        ("services/rlhfspec/cli/start.py", "BOTH, WAIT = 2, 3\n", 1, "the constant WAIT has another value in libs"),
    ],
)
def test_a_name_that_means_two_things_is_told(tmp_path: Path, path: str, text: str, line: int, words: str) -> None:
    first = "class Cache: ...\nclass _Row: ...\nWAIT = 2\nclass Again:\n    WAIT = 1\n"
    [fault] = house.faults_of(of(tmp_path, {CORE: first, path: text}))
    assert (str(fault.path), fault.line) == (path, line)
    assert words in fault.words


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("services/rlhfspec/cli/start.py", "# for the person who started it, and users who may\n# whose\n"),
        (CORE, "# for whoever reads it\n"),  # a room that is not finished
    ],
)
def test_a_person_is_somebody_who(tmp_path: Path, path: str, text: str) -> None:
    assert house.faults_of(of(tmp_path, {path: text})) == []


@pytest.mark.parametrize(
    "text",
    [
        "WAIT = 2\n",
        "_WAIT = 3\n",
        "wait = 3\n",
        "def f():\n    WAIT = 3\n",
        "class Stopped:\n    WAIT = 3\n",
        "from rlhfspec.engine.core import Cache, WAIT\n",
    ],
)
def test_a_name_that_means_one_thing_is_none(tmp_path: Path, text: str) -> None:
    first = "class Cache: ...\nWAIT = 2\n"
    assert house.faults_of(of(tmp_path, {CORE: first, "services/rlhfspec/cli/start.py": text})) == []


def test_what_protoc_names_may_have_any_value(tmp_path: Path) -> None:
    first, second = "libs/rlhfspec/engine/a_pb2.py", "libs/rlhfspec/engine/b_pb2.py"
    assert house.faults_of(of(tmp_path, {first: "DESCRIPTOR = 1\n", second: "DESCRIPTOR = 2\n"})) == []


@pytest.mark.parametrize(
    "back",
    [
        "from rlhfspec.engine.core import step\n",
        "def f():\n    from rlhfspec.engine import core\n",
        "if TYPE_CHECKING:\n    import rlhfspec.engine.core\n",
    ],
)
def test_a_circle_is_told_however_it_is_imported(tmp_path: Path, back: str) -> None:
    [fault] = house.faults_of(of(tmp_path, {"libs/rlhfspec/engine/cache.py": back}))
    assert fault.words == "a circle of imports: rlhfspec.engine.cache, rlhfspec.engine.core"


def test_circles_are_told_apart() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": {"f"}, "f": {"e"}}
    assert house.circles_of(imports) == {frozenset("abc"), frozenset("ef")}
    assert house.circles_of(imports | {"c": set(), "f": set()}) == set()


def test_faults_are_printed_and_end_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted = of(tmp_path, {"docs/job.md": "[it](nowhere.md)\n`make tests`\n"})
    monkeypatch.setattr(House, "of_git", lambda root: planted)
    assert house.main() == 1
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        "docs/job.md:1: nowhere.md does not exist",
        "docs/job.md:2: make tests is no target of the Makefile",
    ]
    assert said[2].endswith("2 faults")


def test_the_tiers_are_those_of_the_folders() -> None:
    assert tuple(TIERS) == house.TIERS
    assert {path.name for path in TESTS.iterdir() if path.is_dir() and any(path.rglob("test_*.py"))} == set(TIERS)


def test_the_tests_of_a_contract_are_tests(tmp_path: Path) -> None:
    path = "tests/unit/engine/test_core.py"
    assert house.faults_of(of(tmp_path, {path: "class TestCore(EngineContract): ...\n"})) == []
