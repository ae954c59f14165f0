"""Which tests of tests/unit and tests/torch a change calls for, by the graph of imports; `make test-fast` runs them.

    python tools/choose_tests.py                              # what differs from the default branch, committed or not
    python tools/choose_tests.py libs/rlhfspec/errors.py             # as if this file alone had changed
    python tools/choose_tests.py --run -n 2 -- libs/rlhfspec/errors.py

A test file is chosen when it changed itself, or when something changed that it imports: a module of ours or one of the
modules beside the tests, directly or through others, at the top of a file or within a function. A module that none
imports, for a table names it (as drafters), counts for all tests of its room too. A file that is no Python counts for
the package it lies in (sources of native kernels, the dashboard's pages), elsewhere for the files that name it or its
folder. What every test depends on (`FOR_ALL`) chooses all.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
CODE_ROOTS = ("libs", "kernels", "services", "operators", "bench/src")
BESIDE = ("tests", "e2e", "tools", "charts")  # where `import name` finds what is no package
TIERS = ("tests/unit", "tests/torch")
FOR_ALL = (
    "pyproject.toml", "constraints.txt",
    *(f"tests/{name}.py" for name in ("proved_once", "conftest", "coroutines", "on_device", "sweeps", "tiers")),
)  # fmt: skip
DOCSTRINGS = "tests/processes/house/test_docstrings.py::test_module_imports_and_its_examples_are_true"


@dataclass(frozen=True)
class Source:
    """What a Python file beside the packages imports. `modules`: of ours; `beside`: files."""

    path: Path
    modules: frozenset[str] = frozenset()
    beside: frozenset[Path] = frozenset()
    words: frozenset[str] = frozenset()  # its text constants


@dataclass(frozen=True)
class Fixture:
    source: Source
    others: frozenset[str]  # fixtures that it is made of


@dataclass
class Choice:
    """`files`: the tests' files, and for each what called for it. `doctests`: modules whose examples are tried."""

    files: dict[Path, Path] = field(default_factory=dict)
    doctests: list[str] = field(default_factory=list)
    left: list[Path] = field(default_factory=list)  # tests that changed and are not of these tiers

    @property
    def arguments(self) -> list[str]:
        everything = {str(path) for path in self.files}
        more = [] if DOCSTRINGS.split("::")[0] in everything else [f"{DOCSTRINGS}[{name}]" for name in self.doctests]
        return [*sorted(everything), *more]

    def __str__(self) -> str:
        """One line: how many, why, and which by folder."""
        by_folder: dict[str, list[str]] = {}
        for path in sorted(self.files):
            by_folder.setdefault(str(path.parent.relative_to("tests")), []).append(path.stem.removeprefix("test_"))
        which = "; ".join(f"{folder}: {' '.join(names)}" for folder, names in by_folder.items())
        causes = sorted({str(path) for path in self.files.values()})
        why = ", ".join(causes[:3]) + (f" and {len(causes) - 3} more" if len(causes) > 3 else "")
        said = f"{len(self.files)} test files, for {why}: {which}" if self.files else "no test of unit and torch"
        said += f"; the examples of {len(self.doctests)} modules" if self.doctests else ""
        return said + (f"; left to make test: {', '.join(map(str, self.left))}" if self.left else "")


class Repository:
    """`graph`: of the modules of ours, as grimp builds it."""

    def __init__(self, root: Path, graph: grimp.ImportGraph) -> None:
        self.root = root
        self.graph = graph

    @cached_property
    def sources(self) -> dict[Path, Source]:
        files = (path.relative_to(self.root) for folder in BESIDE for path in (self.root / folder).rglob("*.py"))
        return {path: self._read(path) for path in sorted(files)}

    @cached_property
    def tests(self) -> list[Path]:
        return [path for path in self.sources if path.name.startswith("test_") and str(path).startswith(TIERS)]

    @cached_property
    def fixtures(self) -> dict[str, Fixture]:
        """Of tests/conftest.py, by name: with what each needs alone."""
        path = Path("tests/conftest.py")
        tree = ast.parse((self.root / path).read_text()) if (self.root / path).exists() else ast.Module([], [])
        bound = {name: node for node in tree.body for name in _names_of(node)}
        found = {}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and any(
                "fixture" in ast.unparse(each) for each in node.decorator_list
            ):
                names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} & set(bound)
                source = self._source(path, [node, *(bound[name] for name in names)])
                found[node.name] = Fixture(source, _arguments(node) & set(bound))
        return found

    def module_of(self, path: Path) -> str:
        """Empty where there is none: a file that is not of ours, or is gone."""
        within = next((path.relative_to(root) for root in CODE_ROOTS if path.is_relative_to(root)), path)
        if within.parts[0] != "rlhfspec":
            return ""
        name = ".".join(within.with_suffix("").parts).removesuffix(".__init__")
        if path.suffix != ".py":  # it belongs to the package around it
            name = name.rpartition(".")[0]
            while name and name not in self.graph.modules:
                name = name.rpartition(".")[0]
        return name if name in self.graph.modules and name != "rlhfspec" else ""

    def reached_from(self, path: Path) -> set[str | Path]:
        """All that depends on this file: modules by name, files beside them by path."""
        reached: set[str | Path] = {path}
        if module := self.module_of(path):
            whole = path.suffix != ".py" or path.name == "__init__.py"  # it runs before whatever the package holds
            within = {module, *(self.graph.find_descendants(module) if whole else ())}
            reached |= within.union(*(self.graph.find_downstream_modules(name) for name in within))
            if not self.graph.find_modules_that_directly_import(module):
                reached |= {test for test in self.tests if test.parent.name in module.split(".")[1:-1]}
        elif path.suffix != ".py":
            names = {path.name, path.parent.name} - {""}
            reached |= {each.path for each in self.sources.values() if names & each.words}
        return self._with_importers(reached)

    def _with_importers(self, reached: set[str | Path]) -> set[str | Path]:
        """And the files that import it, through each other too."""
        while True:
            more = {
                path
                for path, source in self.sources.items()
                if path not in reached and not reached.isdisjoint(source.modules | source.beside)
            }
            if not more:
                return reached
            reached = reached | more

    def _read(self, path: Path) -> Source:
        tree = ast.parse((self.root / path).read_text())
        found = [self._source(path, [tree])]
        if path.name.startswith("test_") and path.parts[0] == "tests":
            wanted, seen = _arguments(tree) & set(self.fixtures), set[str]()
            while wanted:
                seen |= wanted
                found += [self.fixtures[name].source for name in wanted]
                wanted = set().union(*(self.fixtures[name].others for name in wanted)) - seen
        modules = frozenset().union(*(each.modules for each in found))
        return Source(path, modules, frozenset().union(*(each.beside for each in found)), found[0].words)

    def _source(self, path: Path, nodes: Iterable[ast.AST]) -> Source:
        every = [each for node in nodes for each in ast.walk(node)]
        names = {name for node in every for name in _imported(node)}
        words = {node.value for node in every if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        modules = frozenset(names & self.graph.modules)
        return Source(path, modules, frozenset(filter(None, map(self._beside, names))), frozenset(words))

    def _beside(self, name: str) -> Path | None:
        for folder in BESIDE:
            for ending in (".py", "/__init__.py"):
                path = Path(folder, name.replace(".", "/") + ending)
                if (self.root / path).exists():
                    return path
        return None


def _arguments(tree: ast.AST) -> frozenset[str]:
    """Of all functions within: among them the fixtures that they ask for."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(each.arg for function in functions for each in function.args.args)


def _names_of(node: ast.stmt) -> Iterator[str]:
    """What a statement at the top of a file makes known to those below it."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
    elif isinstance(node, ast.FunctionDef | ast.ClassDef):
        yield node.name


def _imported(node: ast.AST) -> Iterator[str]:
    """Every name that could be a module: `from a import b` may mean a.b.

    >>> sorted({name for node in ast.walk(ast.parse("from a import b, c; import d.e")) for name in _imported(node)})
    ['a', 'a.b', 'a.c', 'd.e']
    """
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def choose(repository: Repository, changed: Iterable[Path]) -> Choice:
    choice = Choice()
    for path in sorted(changed):
        if str(path) in FOR_ALL:
            return Choice(dict.fromkeys(repository.tests, path))
        reached = repository.reached_from(path)
        for test in repository.tests:
            if test in reached:
                choice.files.setdefault(test, path)
        if path.suffix == ".py" and (module := repository.module_of(path)):
            choice.doctests.append(module)
        if path.name.startswith("test_") and path in repository.sources and path not in repository.tests:
            choice.left.append(path)
    return choice


def changed_files(root: Path) -> set[Path]:
    """Since this branch left the default one; and what is not committed or not even added."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return [name for name in done.stdout.split("\0") if name] if done.returncode == 0 else []

    heads = ("origin/HEAD", "origin/main", "main", "master")
    bases = (git("merge-base", "HEAD", head) for head in heads)
    base = next((found[0].strip() for found in bases if found), "HEAD")
    listed = git("diff", "--name-only", "-z", base) + git("ls-files", "-z", "--others", "--exclude-standard")
    return {Path(name) for name in listed}


def main() -> int:
    parser = argparse.ArgumentParser(description="The tests of tests/unit and tests/torch that a change calls for.")
    parser.add_argument("files", nargs="*", type=Path, help="what changed; without: what git says")
    parser.add_argument("--run", action="store_true", help="and run them")
    parser.add_argument("-n", "--workers", default="2", help="processes that run them")
    given = parser.parse_args()
    changed = {Path(os.path.relpath(path.absolute(), ROOT)) for path in given.files} or changed_files(ROOT)
    choice = choose(Repository(ROOT, grimp.build_graph("rlhfspec", cache_dir=None)), changed)
    print(choice, flush=True)
    if not given.run or not choice.arguments:
        return 0
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", given.workers, "--dist", "worksteal", *choice.arguments]
    return subprocess.run(pytest, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
