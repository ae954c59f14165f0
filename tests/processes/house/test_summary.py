"""Pytest runs are the same by commit and report what is skipped; a nursery's processes are as any."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import warmed
from places import TESTS
from sweeps import seed_of_turns

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
    "tests/unit/room/test_turns.py": """
import pytest
pytestmark = pytest.mark.turns(parts=2)
def test_a(): ...
def test_b(): ...
@pytest.mark.parametrize("value", range(2))
def test_c(value): ...
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
    return subprocess.run(command, cwd=repository, env=environment, capture_output=True, text=True, check=False).stdout


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
    files = ["tests/unit/room/test_values.py", "tests/unit/room/test_turns.py"]
    said = pytest_says(repository, "--collect-only", *(options or files))
    return {line.split("::")[1] for line in said.splitlines() if "::" in line}


def test_each_commit_runs_its_own_part_of_a_sweep(repository: Path) -> None:
    parts = [collected(repository)]  # without git
    git = ["git", "-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init", "-q"], cwd=repository, check=True)
    dated = os.environ | {"GIT_AUTHOR_DATE": "@1700000000 +0000", "GIT_COMMITTER_DATE": "@1700000000 +0000"}
    for name in OF_TWO_PARTS:
        subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", name], cwd=repository, env=dated, check=True)
        parts.append(collected(repository))
    assert collected(repository) == parts[-1], "again the same for the same commit"
    values = {"test_one[only]", *(f"test_values[{value}]" for value in range(7))}
    turns = [sorted(part - values) for part in parts]
    assert all("test_one[only]" in part and len(part & values) in (3, 4) for part in parts)
    assert set().union(*parts) == values | {"test_a", "test_b", "test_c[0]", "test_c[1]"}
    assert {len(turn) for turn in turns} <= {1, 2, 3}
    assert all(("test_c[0]" in turn) == ("test_c[1]" in turn) for turn in turns), "a test is taken with all its values"


def test_every_turn_of_a_sweep_meets_every_value() -> None:
    assert len({(seed % 3, seed_of_turns(seed) % 3) for seed in range(100)}) == 9


@pytest.mark.parametrize(
    ("options", "number"), [("--whole", 10), ("::test_values[4] ::test_values[5]", 2), ("::test_slow", 2)]
)
def test_all_values_of_a_sweep_run_on_demand(repository: Path, options: str, number: int) -> None:
    file = "tests/unit/room/test_values.py"
    given = [file + each for each in options.split()] if ":" in options else [options, file]
    assert len(collected(repository, *given)) == number


def test_unit_tests_import_no_torch_when_they_are_collected() -> None:
    code = "import pytest, sys; pytest.main(['--collect-only', '-q', 'tests/unit']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    assert "error" not in done.stdout.splitlines()[-3], done.stdout[-2000:]


ABOUT = """
import json, os, sys
from pathlib import Path
print(json.dumps({
    "arguments": sys.argv, "command": Path("/proc/self/cmdline").read_text().rstrip("\\0").split("\\0"),
    "environment": sorted(filter(None, Path("/proc/self/environ").read_text().split("\\0"))), "folder": os.getcwd(),
    "here": sorted(f"{name}={value}" for name, value in os.environ.items()), "stdin": sys.stdin.read(),
    "parent": os.getppid(), "is warm": "torch" in sys.modules, "name": __name__,
    "handles": [n for n in map(int, os.listdir("/proc/self/fd")) if n < 500 and os.path.exists(f"/proc/self/fd/{n}")],
}))
"""
STARTS = f"""
import asyncio, os, sys
async def main(environment):
    command = [sys.executable, "-c", {ABOUT!r}, "of", "another"]
    process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1, env=environment)
    output, _ = await process.communicate(b"hello")
    print(output.decode(), process.returncode, os.getpid())
asyncio.run(main(ENVIRONMENT))
"""


def about(command: list[str], **options: Any) -> dict[str, Any]:
    process = warmed.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **options)
    output, _ = process.communicate(b"hello")
    assert process.returncode == 0
    return dict(json.loads(output))


def told(environment: dict[str, str]) -> list[str]:
    return sorted(f"{name}={value}" for name, value in environment.items())


def test_a_warm_process_gets_the_arguments_and_environment_of_its_command(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RLHFSPEC_RUN": "ü f"}
    command = [sys.executable, "-c", ABOUT, "one", "two words"]
    with (tmp_path / "lock").open("w") as lock:
        seen = about(command, cwd=tmp_path, env=environment, pass_fds=[lock.fileno()])
        assert {0, 1, 2, lock.fileno()} <= set(seen["handles"])
        assert len(seen["handles"]) <= 5, "those, and the folder that it lists"
    assert seen["is warm"]
    assert (seen["arguments"], seen["command"]) == (["-c", "one", "two words"], command)
    assert seen["environment"] == seen["here"] == told(environment)
    assert (seen["folder"], seen["parent"], seen["stdin"]) == (str(tmp_path), os.getpid(), "hello")
    assert seen["name"] == "__main__"


@pytest.mark.parametrize(("given", "warm"), [("os.environ | {'A': 'b'}", True), ("{'A': 'b'}", False)])
def test_a_process_started_by_a_warm_process_is_its_child(given: str, warm: bool) -> None:
    """A process that it starts is warm too, unless its environment has other variables that imports read."""
    command = [sys.executable, "-c", STARTS.replace("ENVIRONMENT", given)]
    done = warmed.run(command, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True)
    said, code, pid = done.stdout.rsplit(maxsplit=2)
    seen = json.loads(said)
    assert (seen["is warm"], code, seen["parent"]) == (warm, "0", int(pid)), done.stderr
    assert "A=b" in seen["environment"]
    assert seen["arguments"] == ["-c", "of", "another"]


@pytest.mark.parametrize("code", ["import sys; sys.exit(7)", "import os; os.kill(os.getpid(), 9)"])
def test_a_warm_process_ends_with_the_exit_code_of_its_command(code: str) -> None:
    done = warmed.run([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == (7 if "exit" in code else -9)


@pytest.mark.parametrize("variable", ["PYTHONUTF8", "OMP_NUM_THREADS", "LC_ALL", "TRITON_INTERPRET"])
def test_a_variable_that_imports_read_starts_a_cold_process(variable: str) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | {variable: "0" if variable != "LC_ALL" else "C.UTF-8"}
    assert not about([sys.executable, "-c", ABOUT], env=environment)["is warm"]
