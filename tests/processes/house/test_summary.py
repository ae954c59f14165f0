"""Pytest runs are reproducible by commit, report skipped tests, and report tests in the wrong tier."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import TESTS

PLUGINS = ["same_environment", "skips", "sweeps", "tiers"]
STARTING = "import subprocess, sys\ndef test_{}():\n    subprocess.run([sys.executable, '-c', 'pass'], check=True)\n"
IMPORTING = "def test_{}():\n    import torch\n"
OF_TWO_PARTS = ("one", "two")  # subjects of commits whose thirds of values differ
FILES = {
    "tests/unit/room/test_skips.py": """
import pytest
NO_NIXL = pytest.mark.skipif(True, reason="the package nixl is not installed")

@pytest.mark.parametrize("way", ["read", "write"])
@NO_NIXL
def test_nixl(way): ...

def test_gpu():
    pytest.skip("there is no GPU")
""",
    "tests/unit/room/test_values.py": """
import pytest

@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("value", range(7))
def test_values(value): ...

@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("value", ["only"])
def test_one(value): ...

WHOLE = pytest.mark.whole
@WHOLE("it is slow")
@pytest.mark.parametrize("value", range(2))
def test_slow(value): ...
""",
    "tests/unit/room/test_environment.py": """
import os

def test_one_that_tells(): os.environ |= {"OMP_NUM_THREADS": "7", "TORCH_NEW": "1"}
def test_another(): assert (os.environ["OMP_NUM_THREADS"], "TORCH_NEW" in os.environ) == ("1", False)
""",
    "tests/unit/room/test_tier.py": STARTING.format("unit_starts") + IMPORTING.format("unit_imports"),
    "tests/torch/room/test_tier.py": STARTING.format("torch_starts")
    + IMPORTING.format("torch_imports")
    + "    import sys; del sys.modules['torch']\n",
    "tests/processes/room/test_tier.py": STARTING.format("processes_starts"),
    "torch.py": "",
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    files = {f"tests/{name}.py": (TESTS / f"{name}.py").read_text() for name in (*PLUGINS, "places", "warmed")}
    ini = "[pytest]\npythonpath = tests .\naddopts = --strict-markers --import-mode=importlib\n"
    files |= {"tests/conftest.py": f"pytest_plugins = {PLUGINS}\n", "pytest.ini": ini, **FILES}
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def pytest_says(repository: Path, *options: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
    own = {name: value for name, value in os.environ.items() if name not in ("PYTEST_ADDOPTS", "SWEEP")}
    environment = own | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_skips_are_counted_by_reason_and_tests_in_wrong_tiers_fail(repository: Path, options: tuple[str, ...]) -> None:
    said = pytest_says(repository, "-rf", *options)
    lines = said.splitlines()
    title = next(place for place, line in enumerate(lines) if "tests that did not run, by reason" in line)
    reasons = ["2 skipped: the package nixl is not installed", "1 skipped: there is no GPU"]
    assert lines[title + 1 : title + 3] == reasons
    title = next(place for place, line in enumerate(lines) if "2 tests left to make test-whole" in line)
    assert lines[title + 1] == "2 left: it is slow"
    failed = {line.split("::")[1].split(" ")[0]: line for line in lines if line.startswith("FAILED")}
    assert failed.keys() == {"test_unit_starts", "test_unit_imports", "test_torch_starts"}
    assert said.count("it belongs to tests/processes") >= 2
    assert "it belongs to tests/torch" in said


def test_a_tier_is_a_marker_too(repository: Path) -> None:
    said = pytest_says(repository, "--collect-only", "-m", "torch")
    assert {line.split("/")[1] for line in said.splitlines() if "::" in line} == {"torch"}


def collected(repository: Path, *options: str) -> set[str]:
    said = pytest_says(repository, "--collect-only", *(options or ["tests/unit/room/test_values.py"]))
    return {line.split("::")[1] for line in said.splitlines() if "::" in line}


def test_a_run_takes_the_part_of_a_sweep_that_its_commit_says(repository: Path) -> None:
    parts = [collected(repository)]  # without git
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init", "-q"], cwd=repository, check=True)
    dated = os.environ | {"GIT_AUTHOR_DATE": "@1700000000 +0000", "GIT_COMMITTER_DATE": "@1700000000 +0000"}
    for name in OF_TWO_PARTS:
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", name], cwd=repository, env=dated, check=True)
        parts.append(collected(repository))
    assert collected(repository) == parts[-1], "again the same for the same commit"
    assert set().union(*parts) == {"test_one[only]", *(f"test_values[{value}]" for value in range(7))}
    assert all("test_one[only]" in part and len(part) in (3, 4) for part in parts)


@pytest.mark.parametrize(
    ("options", "number"), [("--whole", 10), ("::test_values[4] ::test_values[5]", 2), ("::test_slow", 2)]
)
def test_all_values_are_taken_on_demand(repository: Path, options: str, number: int) -> None:
    file = "tests/unit/room/test_values.py"
    given = [file + each for each in options.split()] if ":" in options else [options, file]
    assert len(collected(repository, *given)) == number


def test_unit_tests_import_no_torch_when_they_are_collected() -> None:
    code = "import pytest, sys; pytest.main(['--collect-only', '-q', 'tests/unit']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "error" not in done.stdout.splitlines()[-3], done.stdout[-2000:]
