"""A run of pytest says how many tests did not run, and why, and of a test in the wrong tier where it belongs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import TESTS

PLUGINS = ["out_of_time", "reruns", "same_environment", "skips", "sweeps", "tiers"]
SKIPPING = """
import pytest
NO_NIXL = pytest.mark.skipif(True, reason="the package nixl is not installed")

@pytest.mark.parametrize("way", ["read", "write"])
@NO_NIXL
def test_nixl(way): ...

@pytest.mark.parametrize("kind", ["shm", pytest.param("nixl", marks=NO_NIXL)])
def test_kinds(kind): ...

def test_gpu():
    pytest.skip("there is no GPU")
"""
STARTING = "import subprocess, sys\ndef test_it():\n    subprocess.run([sys.executable, '-c', 'pass'], check=True)\n"
FAILING_ONCE = """
import pathlib, pytest

@pytest.fixture(scope="module")
def run(tmp_path_factory):
    runs = pathlib.Path(__file__).with_name("runs")
    runs.write_text(runs.read_text() + "." if runs.exists() else ".")
    return len(runs.read_text())

def test_before(run): assert run == 1
def test_it(run): assert run == 2
def test_behind(run): assert run == 2
"""
SWEEPING = """
import pytest

@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("value", range(7))
def test_values(value): ...

@pytest.mark.sweep(parts=3)
@pytest.mark.parametrize("value", ["only"])
def test_one(value): ...

def test_plain(): ...
"""
LONG = """
import os, time, pytest

@pytest.fixture(scope="module")
def world():
    os.environ["TESTS_UNTIL"] = str(time.time() - 1)

def test_that_time_is_over_behind(world): ...
def test_too_late(): pytest.fail("it was run")
"""
TELLING_IMPORTS = """
import os

def test_one_that_tells(): os.environ |= {"OMP_NUM_THREADS": "7", "TORCH_NEW": "1"}
def test_another(): assert (os.environ["OMP_NUM_THREADS"], "TORCH_NEW" in os.environ) == ("1", False)
"""
IMPORTING = "def test_it():\n    import torch\n"


def pytest_says(folder: Path, place: str, code: str, *options: str) -> str:
    """Of a repository with this one file of tests."""
    for name in (*PLUGINS, "places", "warmed"):
        (folder / "tests").mkdir(exist_ok=True)
        shutil.copy(TESTS / f"{name}.py", folder / "tests")
    (folder / "tests" / "conftest.py").write_text(f"pytest_plugins = {PLUGINS}\n")
    (folder / "pytest.ini").write_text(
        "[pytest]\npythonpath = tests\naddopts = --strict-markers --import-mode=importlib\n"
    )
    (folder / place).parent.mkdir(parents=True)
    (folder / place).write_text(code)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", *options]
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # those of CI
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done.stdout


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_what_did_not_run_is_counted_by_reason(tmp_path: Path, options: tuple[str, ...]) -> None:
    said = pytest_says(tmp_path, "tests/unit/room/test_it.py", SKIPPING, *options).splitlines()
    title = next(index for index, line in enumerate(said) if "tests that did not run, by reason" in line)
    assert said[title + 1 : title + 3] == [
        "3 skipped: the package nixl is not installed",
        "1 skipped: there is no GPU",
    ]


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_what_time_was_over_for_is_counted_and_not_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    said = pytest_says(tmp_path, "tests/unit/room/test_it.py", LONG, *options)
    assert "1 passed, 1 skipped" in said
    assert "1 skipped: the time for tests was over" in said


def test_what_a_test_tells_imports_is_forgotten_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "2 passed" in pytest_says(tmp_path, "tests/unit/room/test_it.py", TELLING_IMPORTS)


def test_where_time_may_be_short_each_day_begins_with_another_third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TESTS_UNTIL", str(time.time() + 3600))
    behind_unit_tests = []
    for day in range(3):
        monkeypatch.setenv("SWEEP", str(day))
        for room in "abcde":
            (test := tmp_path / f"{day}/tests/runs/{room}/test_it.py").parent.mkdir(parents=True)
            test.write_text("def test_it(): ...\n")
        said = pytest_says(tmp_path / str(day), "tests/unit/z/test_it.py", "def test_it(): ...\n", "--collect-only")
        first, *others = [line.split("/")[-2] for line in said.splitlines() if "::" in line]
        assert first == "z"
        behind_unit_tests.append("".join(others))
    assert behind_unit_tests == ["adbec", "becad", "cadbe"]


@pytest.mark.parametrize(("options", "said"), [(["--reruns", "1"], "3 passed, 1 rerun"), ([], "2 failed, 1 passed")])
def test_what_is_run_again_has_new_fixtures_of_its_module(tmp_path: Path, options: list[str], said: str) -> None:
    assert said in pytest_says(tmp_path, "tests/runs/room/test_it.py", FAILING_ONCE, *options)


@pytest.mark.parametrize(
    ("place", "code", "said"),
    [
        ("tests/unit/room/test_it.py", STARTING, "it belongs to tests/processes"),
        ("tests/torch/room/test_it.py", STARTING, "it belongs to tests/processes"),
        ("tests/unit/room/test_it.py", IMPORTING, "it belongs to tests/torch"),
        ("tests/processes/room/test_it.py", STARTING, "1 passed"),
        ("tests/torch/room/test_it.py", IMPORTING, "1 passed"),
    ],
)
def test_a_test_that_needs_more_than_its_tier_has_is_told_where_it_belongs(
    tmp_path: Path, place: str, code: str, said: str
) -> None:
    assert said in pytest_says(tmp_path, place, code)


def test_a_tier_is_a_marker_too(tmp_path: Path) -> None:
    assert "1 deselected" in pytest_says(tmp_path, "tests/unit/room/test_it.py", IMPORTING, "-m", "torch")


def test_unit_tests_import_no_torch_when_they_are_collected() -> None:
    code = "import pytest, sys; pytest.main(['--collect-only', '-q', 'tests/unit']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "error" not in done.stdout.splitlines()[-3], done.stdout[-2000:]


def test_a_run_takes_a_part_of_a_sweep_and_days_in_succession_take_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = "tests/unit/room/test_values.py"
    values = {f"test_values[{value}]" for value in range(7)}
    days = []
    for day in (0, 1, 2):
        monkeypatch.setenv("SWEEP", str(day))
        (folder := tmp_path / str(day)).mkdir()
        said = pytest_says(folder, place, SWEEPING, "--collect-only")
        days.append({line.split("::")[1] for line in said.splitlines() if "::" in line})
        assert f"{9 - len(days[-1])} deselected" in said
        assert {"test_one[only]", "test_plain"} < days[-1]
    assert set().union(*days) >= values
    assert max(map(len, days)) == 5
    for option in (["--whole"], [f"{place}::test_values[4]", f"{place}::test_values[5]"]):
        (folder := tmp_path / option[0].replace("/", "-")).mkdir()
        said = pytest_says(folder, place, SWEEPING, *option)
        assert ("9 passed" if "--whole" in option else "2 passed") in said, said
