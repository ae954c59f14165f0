"""The house keeps its shape: small files and functions, packages that are ones, honest documents, no circles.

    python tools/house.py        # a line for each fault, file:line: what is wrong; exit code 1 if there is any

`make check` runs it. Each rule is a generator of faults over the files that git has or would take.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

CODE_ROOTS = ("libs", "kernels", "services", "operators", "bench/src")
TIERS = ("unit", "torch", "processes", "servers", "runs")
MOST_LINES = 450
MOST_LINES_OF_TESTS = 600
MOST_LINES_OF_A_FUNCTION = 60
# Where a process, or what stands for one, ends: nobody above could do better than to say what was raised.
MAY_CATCH_ALL = {
    "rlhfspec.bench.rivals.serve",
    "rlhfspec.door.calls",  # whatever ends the engine ends its calls
    "rlhfspec.engine.vllm.inside.serve",
    "rlhfspec.training.scoring.rewards.user_code",
    "rlhfspec.worker.process",
    "rlhfspec.stage.threads",
    # what the API server took and nobody here foresaw stops no other job
    "rlhfspec.operator.shared.leftovers",
    *(f"rlhfspec.operator.looking.{name}" for name in ("queue", "looks", "views", "watching")),
    # whatever a model raises is a verdict on it
    *(f"rlhfspec.sweep.{name}" for name in ("run", "verdict")),
}
AS_IF_PERSONS = re.compile(r"(?<!person )(?<!user )(?<!users )\b(?:who|whoever|nobody)\b", re.IGNORECASE)
# A sentence that begins so has no subject that a reader could know.
RIDDLES = re.compile(r"(?:^|[.;:!] )(What|Who|Whoever|Whom|Whose|Whether|Of|So many|Nobody|Somebody)\b")
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "e2e/README.md", "docs/")
MOST_WORDS = 40_000
TEXTS = {".py", ".md", ".toml", ".txt", ".cpp", ".h", ".yaml", ".json", ""}
# What takes Python objects, and with them code, from a file or another process.
UNPICKLES = {"_pickle", "cloudpickle", "dill", "joblib", "marshal", "multiprocessing", "pickle", "shelve"}
SENDS_OBJECTS = re.compile(r"(broadcast|send|recv)_object_list|(all_)?gather_object|scatter_object\w*")
OF_ONE_MACHINE = re.compile(r"(?<![\w.$~}])/(?:work|root|home|Users)/\w")


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, order=True)
class Fault:
    """
    >>> str(Fault(Path("docs/job.md"), 7, "nowhere.md does not exist"))
    'docs/job.md:7: nowhere.md does not exist'
    """

    path: Path
    line: int
    words: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.words}"


@dataclass(frozen=True)
class House:
    """`files`: relative to the root."""

    root: Path
    files: tuple[Path, ...]

    @classmethod
    def of_git(cls, root: Path) -> House:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        return cls(root, tuple(Path(name) for name in sorted(set(listed.split("\0"))) if (root / name).is_file()))

    def text(self, path: Path) -> str:
        return (self.root / path).read_text()

    def tree(self, path: Path) -> ast.Module:
        return ast.parse(self.text(path))

    def ending(self, suffix: str) -> Iterator[Path]:
        return (path for path in self.files if path.suffix == suffix)

    @cached_property
    def code(self) -> tuple[Path, ...]:
        return tuple(path for path in self.ending(".py") if in_root(path).parts[0] == "rlhfspec")

    def docstrings(self) -> Iterator[tuple[Path, Documented, str]]:
        for path in self.code:
            for node in ast.walk(self.tree(path)):
                if isinstance(node, Documented) and (text := ast.get_docstring(node)):
                    yield path, node, text

    @property
    def documents(self) -> Iterator[Path]:
        return (path for path in self.ending(".md") if str(path).startswith(DOCUMENTS))

    @cached_property
    def modules(self) -> dict[str, Path]:
        return {name: path for path in self.code if (name := module_name(path)) != "rlhfspec"}


def module_name(path: Path) -> str:
    """
    >>> module_name(Path("libs/rlhfspec/engine/__init__.py")), module_name(Path("libs/rlhfspec/errors.py"))
    ('rlhfspec.engine', 'rlhfspec.errors')
    """
    parts = in_root(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def in_root(path: Path) -> Path:
    """Without the code root that it lies in; the path itself where it lies in none.

    >>> str(in_root(Path("bench/src/rlhfspec/bench/generating/run.py"))), str(in_root(Path("bench/plan.py")))
    ('rlhfspec/bench/generating/run.py', 'bench/plan.py')
    """
    return next((path.relative_to(root) for root in CODE_ROOTS if path.is_relative_to(root)), path)


def _root_of(path: Path) -> Path:
    return Path(str(path).removesuffix(str(in_root(path))))


def roots_are_one_namespace(house: House) -> Iterator[Fault]:
    """An __init__.py in one would hide the others, and so would a package that lies in two."""
    first: dict[str, Path] = {}
    for folder in sorted({_root_of(path) / Path(*in_root(path).parts[:2]) for path in house.code}):
        if folder.name == "__init__.py":
            yield Fault(folder, 1, f"{_root_of(folder)} would hide the other roots: remove this file")
        elif folder.name in first:
            yield Fault(folder, 1, f"lies in {first[folder.name]} too: a package has one root")
        first.setdefault(folder.name, folder)


def packages_have_init(house: House) -> Iterator[Fault]:
    for folder in sorted({path.parent for path in house.code}):
        if folder.name != "rlhfspec" and folder / "__init__.py" not in house.files:
            yield Fault(folder, 1, "has Python files and no __init__.py: it would not be imported")


def files_are_small(house: House) -> Iterator[Fault]:
    for path in house.ending(".py"):
        most = MOST_LINES_OF_TESTS if "tests" in path.parts else MOST_LINES
        if (lines := len(house.text(path).splitlines())) > most:
            yield Fault(path, most, f"has {lines} lines, {most} are allowed: split it")


def functions_are_short(house: House) -> Iterator[Fault]:
    for path in house.code:
        for node in ast.walk(house.tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                if lines > MOST_LINES_OF_A_FUNCTION:
                    most = f"{MOST_LINES_OF_A_FUNCTION} are allowed"
                    yield Fault(path, node.lineno, f"{node.name} has {lines} lines, {most}: split it")


def test_files_have_tests(house: House) -> Iterator[Fault]:
    for path in house.ending(".py"):
        if path.parts[0] not in ("tests", "e2e") or not path.name.startswith("test_"):
            continue
        if not any(map(_is_collected, ast.walk(house.tree(path)))):
            yield Fault(path, 1, "nothing here would be collected: a test's name begins with test_")
        if path.parts[0] == "tests" and (len(path.parts) != 4 or path.parts[1] not in TIERS):
            yield Fault(path, 1, f"belongs into tests/TIER/ROOM, where the tier is one of {', '.join(TIERS)}")


def _is_collected(node: ast.AST) -> bool:
    """Of a class, the tests may all be those of the contract that it subclasses (`rlhfspec.testing`)."""
    if isinstance(node, ast.ClassDef):
        return node.name.startswith("Test") and any(ast.unparse(base).endswith("Contract") for base in node.bases)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")


def links_lead_somewhere(house: House) -> Iterator[Fault]:
    for path in house.ending(".md"):
        for number, line in enumerate(house.text(path).splitlines(), 1):
            for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", line):
                if not target.startswith("http") and not (house.root / path.parent / target).exists():
                    yield Fault(path, number, f"{target} does not exist")


def make_targets_in_documents_exist(house: House) -> Iterator[Fault]:
    documents = [p for p in house.ending(".md") if p.parts[0] in ("README.md", "CONTRIBUTING.md", "docs")]
    targets = set(re.findall(r"^([a-z0-9-]+):", house.text(Path("Makefile")), re.MULTILINE)) if documents else set()
    for path in documents:
        for number, code in code_of(house.text(path)):
            for command in re.findall(r"\bmake ([a-z][a-z0-9-]+(?: [a-z0-9-]+)*)", code):
                for word in set(command.split()) - targets:
                    yield Fault(path, number, f"make {word} is no target of the Makefile")


def the_tree_names_what_exists(house: House) -> Iterator[Fault]:
    """The annotated one of CONTRIBUTING.md: no more than there is, and every package."""
    path = Path("CONTRIBUTING.md")
    tree = house.text(path).split("```")[1]
    for number, line in enumerate(tree.splitlines(), house.text(path).split("```")[0].count("\n") + 1):
        name = line.split(" ")[0]  # empty: the title of a floor
        if name and not list(house.root.glob(name.rstrip("/"))):
            yield Fault(path, number, f"shows {name}, which does not exist")
    for package in sorted({in_root(path).parts[1] for path in house.code if len(in_root(path).parts) > 2}):
        if f"rlhfspec/{package}/" not in tree:
            yield Fault(path, 1, f"does not show the package {package}")


def constraints_pin_every_requirement(house: House) -> Iterator[Fault]:
    path = Path("pyproject.toml")
    lines = house.text(Path("constraints.txt")).splitlines()
    pins = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    for number, line in enumerate(house.text(path).splitlines(), 1):
        for name in re.findall(r'"([A-Za-z][A-Za-z0-9-]*)(?:>=|==)', line):
            if name.lower().replace("_", "-") not in pins:
                yield Fault(path, number, f"{name} has no exact version in constraints.txt")


def no_traces_of_one_machine(house: House) -> Iterator[Fault]:
    for path in house.files:
        if path.suffix in TEXTS:
            for number, line in enumerate(house.text(path).splitlines(), 1):
                if found := OF_ONE_MACHINE.search(line):
                    yield Fault(path, number, f"{found.group()} is a path of one machine")


def no_broad_except(house: House) -> Iterator[Fault]:
    for name, path in house.modules.items():
        for node in ast.walk(house.tree(path)):
            if isinstance(node, ast.ExceptHandler) and name not in MAY_CATCH_ALL:
                caught = ast.unparse(node.type) if node.type else "everything"
                if caught in {"everything", "Exception", "BaseException"}:
                    yield Fault(path, node.lineno, f"catches {caught}: name what is expected")


def nothing_is_unpickled(house: House) -> Iterator[Fault]:
    """A message between processes is JSON and arrays (`common.ranks.codec`): one that is unpickled runs code."""
    for path in house.code:
        if not path.is_relative_to("bench/src"):
            for node in ast.walk(house.tree(path)):
                if found := _unpickling(node):
                    yield Fault(path, node.lineno, f"{found} would run code of whatever wrote it")  # type: ignore[attr-defined]


def _unpickling(node: ast.AST) -> str:
    """Return what of a node unpickles; empty: nothing does.

    >>> [_unpickling(node) for node in ast.walk(ast.parse("torch.load(path)")) if _unpickling(node)]
    ['torch.load without weights_only=True']
    """
    imported = []
    if isinstance(node, ast.Import):
        imported = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} != {"UnpicklingError"}:
        imported = [node.module or ""]
    for name in imported:
        if name.split(".")[0] in UNPICKLES or name.startswith("torch.multiprocessing"):
            return name
    name = {ast.Attribute: "attr", ast.Name: "id", ast.alias: "name"}.get(type(node), "")
    if name and SENDS_OBJECTS.fullmatch(getattr(node, name)):
        return str(getattr(node, name))
    if isinstance(node, ast.Call):
        said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if ast.unparse(node.func) == "torch.load" and said.get("weights_only") != "True":
            return "torch.load without weights_only=True"
        if "allow_pickle" in said:
            return "allow_pickle"
    return ""


def no_circles_within_a_package(house: House) -> Iterator[Fault]:
    """Counting what is imported within functions and for types alone."""
    by_package: dict[str, list[str]] = {}
    for name in house.modules:
        by_package.setdefault(name.split(".")[1], []).append(name)
    for names in by_package.values():
        for circle in circles_of({name: imports_of(house, name) & set(names) for name in names}):
            first = min(circle)
            yield Fault(house.modules[first], 1, f"a circle of imports: {', '.join(sorted(circle))}")


def imports_of(house: House, name: str) -> set[str]:
    """The modules of ours that this one imports anywhere: in functions and for types too."""
    found = set()
    for node in ast.walk(house.tree(house.modules[name])):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            within = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in house.modules else node.module for each in within}
    return (found & set(house.modules)) - {name}


def circles_of(imports: dict[str, set[str]]) -> set[frozenset[str]]:
    """Groups of modules each of which leads to every other.

    >>> circles_of({"a": {"b"}, "b": {"a", "c"}, "c": set()}) == {frozenset({"a", "b"})}
    True
    """

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        coming = [start]
        while coming:
            coming += (found := imports[coming.pop()] - seen)
            seen |= found
        return seen

    behind = {name: reached(name) for name in imports}
    return {frozenset(other for other in behind[name] if name in behind[other]) for name in imports} - {frozenset()}


def class_names_mean_one_thing(house: House) -> Iterator[Fault]:
    """Private and nested ones too: who searches for a name finds one class."""
    first: dict[str, Path] = {}
    for path in house.code:
        for node in ast.walk(house.tree(path)):
            if isinstance(node, ast.ClassDef) and (there := first.setdefault(node.name, path)) != path:
                yield Fault(path, node.lineno, f"the class {node.name} is in {there} too: name what sets it apart")


def constants_have_one_value(house: House) -> Iterator[Fault]:
    """Public ones: a second place may repeat a value, not give the name another."""
    first: dict[str, tuple[Path, str]] = {}
    for path in (each for each in house.code if not each.stem.endswith("_pb2")):  # which protoc names
        for line, name, value in _constants_of(house.tree(path)):
            there, known = first.setdefault(name, (path, value))
            if value != known:
                problem = f"the constant {name} has another value in {there}"
                yield Fault(path, line, f"{problem}: name what sets it apart, or begin it with _")


def programs_are_not_persons(house: House) -> Iterator[Fault]:
    """A process *that* waits, and no process: only a person or a user is somebody who does."""
    for path in house.code:
        for number, line in enumerate(house.text(path).splitlines(), 1):
            if found := AS_IF_PERSONS.search(line):
                yield Fault(path, number, f"{found.group()}: name the program or thing that is meant")


def sentences_begin_with_a_subject(house: House) -> Iterator[Fault]:
    """Check docstrings and documents; headings and blocks of code are no sentences."""
    for path, node, text in house.docstrings():
        if found := RIDDLES.search(_prose_of(text)):
            line = node.body[0].lineno
            yield Fault(path, line, f"a sentence begins with {found[1]}: begin with a subject or a verb")
    for path in house.documents:
        inside = False
        for number, line in enumerate(house.text(path).splitlines(), 1):
            inside ^= line.lstrip().startswith("```")
            if not inside and not line.startswith("#") and (found := RIDDLES.search(line.lstrip("|-* "))):
                yield Fault(path, number, f"a sentence begins with {found[1]}: begin with a subject or a verb")


def _prose_of(docstring: str) -> str:
    """Return a docstring in one line, without its examples.

    >>> _prose_of("Add.\\n\\n>>> 1 + 1\\n2")
    'Add. 2'
    """
    lines = [line for line in docstring.splitlines() if not line.lstrip().startswith((">>>", "..."))]
    return " ".join(" ".join(lines).split())


def documents_are_short(house: House) -> Iterator[Fault]:
    words = sum(bool(re.search(r"\w", word)) for path in house.documents for word in house.text(path).split())
    if words > MOST_WORDS:
        yield Fault(Path("docs"), 1, f"the documents have {words:,} words, {MOST_WORDS:,} are allowed")


def _constants_of(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, name and value, as code, of each public one.

    >>> list(_constants_of(ast.parse("A, _B = 1, 2\\nC: int = 3")))
    [(1, 'A', '1'), (2, 'C', '3')]
    """
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=False))
                for each, value in pairs:
                    if isinstance(each, ast.Name) and each.id.isupper() and not each.id.startswith("_"):
                        yield node.lineno, each.id, ast.unparse(value)


def code_of(markdown: str) -> Iterator[tuple[int, str]]:
    """Yield lines of fenced blocks, continued ones joined, and `inline` code, each with the number of its line."""
    fenced, begun = False, ""
    for number, line in enumerate(markdown.splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced:
            begun += line.removesuffix("\\")
            if not line.endswith("\\"):
                yield number, begun
                begun = ""
        else:
            yield from ((number, code) for code in re.findall(r"`([^`]+)`", line))


RULES: tuple[Callable[[House], Iterator[Fault]], ...] = (
    roots_are_one_namespace,
    packages_have_init,
    files_are_small,
    functions_are_short,
    test_files_have_tests,
    links_lead_somewhere,
    make_targets_in_documents_exist,
    the_tree_names_what_exists,
    constraints_pin_every_requirement,
    no_traces_of_one_machine,
    no_broad_except,
    nothing_is_unpickled,
    no_circles_within_a_package,
    class_names_mean_one_thing,
    constants_have_one_value,
    programs_are_not_persons,
    sentences_begin_with_a_subject,
    documents_are_short,
)


def faults_of(house: House, rules: Sequence[Callable[[House], Iterator[Fault]]] = RULES) -> list[Fault]:
    return sorted(fault for rule in rules for fault in rule(house))


def main() -> int:
    house = House.of_git(Path(__file__).parent.parent)
    faults = faults_of(house)
    for fault in faults:
        print(fault)
    print(f"{len(house.files)} files, {len(RULES)} rules, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
