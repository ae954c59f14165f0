"""The slow suites: which of them a change can reach, and what `make test-whole` writes of each into tests/whole.json.

    python tools/suites.py due                     # names of those that something changed for since they last passed
    python tools/suites.py run slow vllm           # the tests of these suites that are due, as .ci/run does
    python tools/suites.py files slow              # all its files of tests
    python tools/suites.py whole [SUITE ...]       # all tests of all suites, or of these; writes tests/whole.json

A suite is due where its last pass is not known, or where a file differs from that commit that it can reach: by the
graph of imports (tools/choose_tests.py), and for tests that start processes by what those run. Layout, comments,
docstrings and settings of linters are no difference. So what is due follows from the commit alone, in any clone.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import grimp
from choose_tests import FOR_ALL, ROOT, Repository

WHOLE = Path("tests/whole.json")
# What processes of a run are made of; the code of an operator and what is beside the wheel is not.
OF_RUNS = ("libs/", "kernels/", "services/", "protos/", "examples/")
NOT_OF_RUNS = tuple(f"services/rlhfspec/{stage}/" for stage in ("control", "dashboard", "prepare"))
STARTING = ("tests/processes/", "tests/servers/", "tests/runs/")


@dataclass(frozen=True)
class Suite:
    """`target`: of make, with `variable` for its files. `tests`: globs of files; of those the ones with `text` in them
    and without `not_text`. `modules`: packages, and `folders`, that it reaches beside what its tests import."""

    target: str
    variable: str = ""
    tests: tuple[str, ...] = ()
    text: str = ""
    not_text: str = "\0"
    modules: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    is_nightly: bool = False  # never for a change alone

    def files(self, root: Path) -> list[Path]:
        found = sorted({path.relative_to(root) for glob in self.tests for path in root.glob(glob)})
        texts = {path: (root / path).read_text() for path in found}
        return [path for path, text in texts.items() if self.text in text and self.not_text not in text]


_ENGINE = ("test_engine", "test_engine_contract", "test_engine_requests", "test_extend", "test_moves", "test_graphs",
           "test_kept_blocks", "test_kv_contents")  # fmt: skip
_ANYWHERE = ("tests/*/[!v]*/test_*.py",)
SUITES = {
    "second-device": Suite(
        "test-second-device", "ON_DEVICE",
        tests=(
            *(f"tests/torch/{glob}" for glob in
              ("checkpoint/test_*.py", "learning/test_learner.py", "scoring/test_*.py", "weights/test_weights.py")),
            *(f"tests/torch/engine/{name}.py" for name in _ENGINE),
        ),
        folders=("tests/second_device/", "tests/on_device.py"),
    ),
    "slow": Suite("test-slow", "TESTS", tests=_ANYWHERE, text="mark.whole(", not_text="whole(PRETRAINED"),
    "vllm": Suite(
        "test-vllm", "TESTS", tests=("tests/*/vllm/test_*.py",), text="vllm_children",
        modules=("rlhfspec.engine.vllm",), folders=("bench/vllm_requirements.py",),
    ),
    "cluster": Suite(
        "e2e-ci", tests=("e2e/test_*.py",), text="mark.ci",
        modules=tuple(f"rlhfspec.{name}" for name in ("operator", "plugin", "prepare", "control", "dashboard")),
        folders=("charts/", "e2e/", "Dockerfile"),
    ),
    "pretrained": Suite("test-slow", "TESTS", tests=_ANYWHERE, text="whole(PRETRAINED", is_nightly=True),
    "sweeps": Suite("test-sweeps", is_nightly=True),
    "kills": Suite("faults", is_nightly=True),
    "cluster-rest": Suite("e2e-rest", is_nightly=True),
}  # fmt: skip


def due_files(suite: Suite, repository: Repository, changed: Iterable[Path]) -> dict[Path, Path]:
    """Return the suite's files of tests that a change reaches, each with the first changed file that does.

    Documents are left to the other tests, and the record of the suites reaches none.
    """
    files = suite.files(repository.root)
    due: dict[Path, Path] = {}
    for path in sorted(each for each in changed if each.suffix != ".md" and each.parts[0] != ".ci" and each != WHOLE):
        name, reached = str(path), repository.reached_from(path)
        whole_suite = name in FOR_ALL or name.startswith(suite.folders or "\0")
        whole_suite |= any(str(each).startswith(suite.modules or "\0") for each in reached)
        is_of_runs = name.startswith(OF_RUNS) and not name.startswith(NOT_OF_RUNS) and not suite.modules
        for test in files:
            if whole_suite or test in reached or (is_of_runs and str(test).startswith(STARTING)):
                due.setdefault(test, path)
    return due


def due(name: str, repository: Repository, passed: str) -> tuple[list[Path], str]:
    """Return the files that are due since that commit, and why, or why none is."""
    suite = SUITES[name]
    command = ["git", "diff", "--name-only", "-z", passed, "--"]
    done = subprocess.run(command, cwd=repository.root, capture_output=True, text=True, check=False)
    if not passed or done.returncode:
        return suite.files(repository.root), f"no commit is known at which it passed ({passed or 'never'})"
    changed = [Path(each) for each in done.stdout.split("\0") if each]
    files = due_files(suite, repository, [each for each in changed if not is_same_program(repository, passed, each)])
    if not files:
        return [], f"nothing that it reaches has changed since {passed[:12]}"
    causes = sorted(map(str, set(files.values())))
    return sorted(files), f"{len(files)} files since {passed[:12]}, for {', '.join(causes[:3])} ({len(causes)} in all)"


def is_same_program(repository: Repository, commit: str, path: Path) -> bool:
    now, read = repository.root / path, {".py": program_of, ".toml": settings_of}.get(path.suffix)
    if read is None or not now.exists():
        return False
    command = ["git", "show", f"{commit}:{path}"]
    before = subprocess.run(command, cwd=repository.root, capture_output=True, text=True, check=False)
    return before.returncode == 0 and read(before.stdout) == read(now.read_text())


def settings_of(text: str) -> str:
    """Return a project's settings without those of tools that only read code.

    >>> settings_of("project.name = 'x'\\ntool.ruff.line-length = 120")
    "{'project': {'name': 'x'}, 'tool': {}}"
    """
    settings = tomllib.loads(text)
    for name in ("ruff", "mypy", "importlinter"):
        settings.get("tool", {}).pop(name, None)
    return repr(settings)


def program_of(text: str) -> str:
    """Return what Python runs of a module, without its docstrings.

    >>> program_of("'A docstring.'\\nx = 1  # a comment") == program_of("x = (\\n    1\\n)")
    True
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        can_have = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if can_have and ast.get_docstring(node, clean=False) is not None:
            del node.body[0]
    return ast.dump(tree)


def last_results(root: Path) -> dict[str, Any]:
    file = root / WHOLE
    return dict(json.loads(file.read_text())) if file.exists() else {}


def run(name: str, files: Iterable[Path]) -> tuple[int, dict[str, int]]:
    """Run a suite, or these files of it; return make's exit code, and numbers of tests by how they ended."""
    suite = SUITES[name]
    given = [f"{suite.variable}={' '.join(map(str, files))}"] if suite.variable and files else []
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={report}"
        made = subprocess.run(
            ["make", suite.target, *given], cwd=ROOT, env=os.environ | {"PYTEST_ADDOPTS": options}, check=False
        )
        counted = counts_of(report) if report.exists() else {}
    return made.returncode, counted


def counts_of(report: Path) -> dict[str, int]:
    totals = dict.fromkeys(("tests", "skipped", "failures", "errors"), 0)
    for each in ElementTree.parse(report).getroot().iter("testsuite"):
        totals = {key: number + int(each.get(key, 0)) for key, number in totals.items()}
    failed = totals["failures"] + totals["errors"]
    return {
        "passed": totals["tests"] - totals["skipped"] - failed, "skipped": totals["skipped"], "failed": failed,
    }  # fmt: skip


def run_whole(names: Iterable[str]) -> int:
    """Run suites whole, and write of each how it went, and the commit if it passed."""
    git = ["git", "status", "--porcelain", "--", ":!tests/whole.json"]
    is_clean = not subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    failed = []
    for name in names:
        began = time.monotonic()
        code, counted = run(name, SUITES[name].files(ROOT))
        has_passed = code == 0 and counted.get("passed", 1) > 0
        failed += [] if has_passed else [name]
        if not is_clean:
            print(f"{name}: not written, for files differ from the commit")
            continue
        results = last_results(ROOT)
        last = {"commit": head.stdout.strip(), "date": time.strftime("%Y-%m-%d"), **counted, "exit_code": code}
        passed = head.stdout.strip() if has_passed else results.get(name, {}).get("passed_at", "")
        results[name] = {"passed_at": passed, "last": last | {"seconds": round(time.monotonic() - began)}}
        (ROOT / WHOLE).write_text(json.dumps(dict(sorted(results.items())), indent=2) + "\n")
    print(f"failed: {', '.join(failed)}" if failed else "all passed")
    return bool(failed)


def main() -> int:
    parser = argparse.ArgumentParser(description="The slow suites of tests.")
    parser.add_argument("what", choices=["due", "run", "files", "whole"])
    parser.add_argument("suites", nargs="*")
    given = parser.parse_args()
    if unknown := set(given.suites) - SUITES.keys():
        parser.error(f"no suite {', '.join(sorted(unknown))}: there are {', '.join(SUITES)}")
    if given.what == "whole":
        return run_whole(given.suites or SUITES)
    if given.what == "files":
        print(*(file for name in given.suites for file in SUITES[name].files(ROOT)))
        return 0
    repository = Repository(ROOT, grimp.build_graph("rlhfspec", cache_dir=None))
    results, failed = last_results(ROOT), False
    for name in given.suites or [name for name, suite in SUITES.items() if not suite.is_nightly]:
        files, why = due(name, repository, results.get(name, {}).get("passed_at", ""))
        print(f"{name}: {why}" if files else f"{name}: left out, {why}", file=sys.stderr, flush=True)
        if files and given.what == "due":
            print(name)
        elif files:
            failed |= run(name, files)[0] != 0
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
