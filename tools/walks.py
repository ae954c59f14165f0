"""Count the files that a newcomer opens to follow four walks through the code, from imports and calls.

    python tools/walks.py                          # how many files each walk crosses
    python tools/walks.py --files                  # and which
    python tools/walks.py --root ../another-tree   # of another checkout

A walk is a list of legs: where something enters a stage, and what becomes of it there. A newcomer opens the files on
the shortest chain of calls between the two, and those of whatever the functions of the chain call. A call is resolved
by imports, annotations and the classes that `__init__` assigns to attributes; a method whose class is unknown may be
any method of that name, if few classes have one, and counts for the chain alone.
"""

from __future__ import annotations

import argparse
import ast
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE_ROOTS = ("libs", "kernels", "services", "operators")
MOST_CLASSES = 6  # a method name that more classes have does not tell which one is called
WALKS = {
    "prompt to trainer": (
        ("PromptsService.run", "NatsTransport.publish"),
        ("GeneratorService.run", "Engine.submit"),
        ("GeneratorService.run", "Engine.step"),
        ("Engine.step", "ModelRunner.forward"),
        ("GeneratorService.run", "Bus.publish"),
        ("RewardService.run", "Bus.publish"),
        ("TrainerService.run", "Learner.learn"),
    ),
    "move": (
        ("RebalancerService.run", "Bus.publish"),
        ("GeneratorService.run", "Moves.export_range"),
        ("GeneratorService.run", "Moves.export_sequence"),
        ("Taking.answer", "Moves.import_range"),
        ("Taking.answer", "Moves.import_sequence"),
    ),
    "apply to pod": (
        ("Operator.run", "Reconciler.reconcile"),
        ("Reconciler.reconcile", "Api.apply"),
        ("deciding.reconcile.reconcile", "pods.pod"),
    ),
    "weights version": (
        ("TrainerService.run", "GrpcWeightStore.put"),
        ("TrainerService.run", "NatsTransport.publish"),
        ("GeneratorService.run", "GrpcWeightStore.get"),
        ("GeneratorService._load_weights", "Engine.load_weights"),
        ("Engine.load_weights", "ModelRunner.load_weights"),
    ),
}
Function = ast.FunctionDef | ast.AsyncFunctionDef


class CallGraph:
    """The functions and methods of a checkout, and the calls between them."""

    def __init__(self, root: Path) -> None:
        self.files: dict[str, Path] = {}  # name of a definition, as module.Class.method -> its file
        self._bodies: dict[str, tuple[str, str, ast.AST]] = {}  # name -> (module, class or "", node)
        self._names: dict[str, dict[str, str]] = {}  # module -> name there -> name of the definition
        self._bases: dict[str, list[str]] = {}
        self._attributes: dict[str, dict[str, str]] = defaultdict(dict)  # class -> attribute -> its class
        self._methods: dict[str, list[str]] = defaultdict(list)  # name of a method -> all of that name
        trees = {module: (path, ast.parse(path.read_text())) for module, path in _modules(root)}
        for module, (path, tree) in trees.items():
            self._define(module, path, tree)
        for module, (_, tree) in trees.items():
            self._import(module, tree)
        for _ in range(3):  # an attribute's class may follow from those of other classes
            for name in self._bases:
                self._type_attributes(name)

    def _define(self, module: str, path: Path, tree: ast.Module) -> None:
        own = self._names[module] = {}
        for node in tree.body:
            if not isinstance(node, Function | ast.ClassDef):
                continue
            name = own[node.name] = f"{module}.{node.name}"
            self.files[name] = path
            self._bodies[name] = (module, name if isinstance(node, ast.ClassDef) else "", node)
            if isinstance(node, ast.ClassDef):
                self._bases[name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
                for method in (each for each in node.body if isinstance(each, Function)):
                    self.files[f"{name}.{method.name}"] = path
                    self._bodies[f"{name}.{method.name}"] = (module, name, method)
                    self._methods[method.name].append(f"{name}.{method.name}")

    def _import(self, module: str, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    whole = self._names.get(node.module, {}).get(alias.name, whole)  # what a package gives on
                    if whole in self._bodies or whole in self._names:
                        self._names[module].setdefault(alias.asname or alias.name, whole)

    def _type_attributes(self, name: str) -> None:
        module, _, node = self._bodies[name]
        for each in ast.walk(node):
            match each:
                case ast.AnnAssign(target=ast.Name(id=attr), annotation=annotation):
                    self._note(name, attr, self._annotated(module, annotation))
                case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=attr), annotation=annotation):
                    self._note(name, attr, self._annotated(module, annotation))
        for method in (each for each in ast.iter_child_nodes(node) if isinstance(each, Function)):
            self._note(name, method.name, self._annotated(module, method.returns))
            types = self._types(module, name, method)
            for each in ast.walk(method):
                match each:
                    case ast.Assign(targets=[ast.Attribute(value=ast.Name(id="self"), attr=attr)], value=value):
                        self._note(name, attr, self._type_of(module, types, value))

    def _note(self, name: str, attribute: str, found: str | None) -> None:
        if found is not None:
            self._attributes[name].setdefault(attribute, found)

    def _types(self, module: str, owner: str, function: Function) -> dict[str, str]:
        """Return the classes of a function's arguments and variables, by name."""
        every = (*function.args.args, *function.args.kwonlyargs)
        types = {each.arg: found for each in every if (found := self._annotated(module, each.annotation))}
        if owner:
            types["self"] = owner
        for each in ast.walk(function):
            match each:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.withitem(context_expr=value, optional_vars=ast.Name(id=name))
                ):
                    if (found := self._type_of(module, types, value)) is not None:
                        types.setdefault(name, found)
        return types

    def _type_of(self, module: str, types: dict[str, str], value: ast.AST) -> str | None:
        """Return the class of an expression, if annotations tell it."""
        match value:
            case ast.Await(value=inner):
                return self._type_of(module, types, inner)
            case ast.IfExp(body=body, orelse=orelse):
                return self._type_of(module, types, body) or self._type_of(module, types, orelse)
            case ast.Call(func=ast.Name(id=name)):
                called = self._names[module].get(name)
                return called if called in self._bases else self._returned(called)
            case ast.Call(func=ast.Attribute() as method):
                return self._type_of(module, types, method)
            case ast.Name(id=name):
                return types.get(name) or (called if (called := self._names[module].get(name)) in self._bases else None)
            case ast.Attribute(value=inner, attr=attr):
                return self._attribute_type(self._type_of(module, types, inner), attr)
        return None

    def _returned(self, function: str | None) -> str | None:
        if function not in self._bodies:
            return None
        module, _, node = self._bodies[function]
        return self._annotated(module, node.returns) if isinstance(node, Function) else None

    def _attribute_type(self, owner: str | None, attribute: str) -> str | None:
        if owner is None or (found := self._attributes[owner].get(attribute)) is not None:
            return found if owner is not None else None
        module = self._bodies[owner][0]
        above = (self._names[module].get(base) for base in self._bases[owner])
        return next(
            (found for each in above if each in self._bases and (found := self._attribute_type(each, attribute))), None
        )

    def _annotated(self, module: str, annotation: ast.AST | None) -> str | None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval")
        for each in ast.walk(annotation) if annotation is not None else ():
            if isinstance(each, ast.Name) and (found := self._names[module].get(each.id)) in self._bases:
                return found
        return None

    def method(self, owner: str, name: str) -> str | None:
        """Return the method that a class has or inherits."""
        if f"{owner}.{name}" in self._bodies:
            return f"{owner}.{name}"
        module = self._bodies[owner][0]
        for base in self._bases[owner]:
            if (above := self._names[module].get(base)) in self._bases and (found := self.method(above, name)):
                return found
        return None

    def calls(self, name: str, *, certain: bool = False) -> Iterator[str]:
        """Yield what a definition calls or hands on; of a class, what its construction does. With `certain`, leave out
        methods of unknown classes."""
        module, owner, node = self._bodies[name]
        if isinstance(node, ast.ClassDef):
            yield from (found for each in ("__init__", "__post_init__") if (found := self.method(name, each)))
            return
        assert isinstance(node, Function)
        types = self._types(module, owner, node)
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and (found := self._names[module].get(each.id)) in self._bodies:
                yield found
            elif isinstance(each, ast.Attribute):
                yield from self._of_attribute(module, types, each, certain)

    def _of_attribute(self, module: str, types: dict[str, str], node: ast.Attribute, certain: bool) -> Iterator[str]:
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        if (within := f"{self._names[module].get(name)}.{node.attr}") in self._bodies:  # of a module
            yield within
            return
        of = self._type_of(module, types, node.value)
        if of is None:
            if not certain and len(self._methods[node.attr]) <= MOST_CLASSES:
                yield from self._methods[node.attr]
        elif (found := self.method(of, node.attr)) is not None:
            yield found
            if not certain and "Protocol" in self._bases[of]:
                yield from self._implementations(of, node.attr)

    def _implementations(self, protocol: str, name: str) -> Iterator[str]:
        """Yield that method of each class that has all methods of the protocol."""
        body = ast.iter_child_nodes(self._bodies[protocol][2])
        wanted = [each.name for each in body if isinstance(each, Function) and not each.decorator_list]
        for owner in self._bases:
            found = self.method(owner, name)
            if found and "Protocol" not in self._bases[owner] and all(self.method(owner, each) for each in wanted):
                yield found

    def find(self, ending: str) -> str:
        """Return the one definition whose name ends so."""
        found = [name for name in self._bodies if name.endswith(f".{ending}")]
        if len(found) != 1:
            raise SystemExit(f"{ending}: {len(found)} definitions: {', '.join(found)}")
        return found[0]

    def chain(self, first: str, last: str) -> list[str]:
        """Return the shortest chain of calls between two definitions, both included."""
        before: dict[str, str] = {first: ""}
        waiting = deque([first])
        while waiting and last not in before:
            name = waiting.popleft()
            for called in sorted(set(self.calls(name))):
                if called not in before:
                    before[called] = name
                    waiting.append(called)
        if last not in before:
            raise SystemExit(f"no chain of calls from {first} to {last}")
        chain = [last]
        while before[chain[-1]]:
            chain.append(before[chain[-1]])
        return chain[::-1]


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    for code_root in CODE_ROOTS:
        for path in sorted((root / code_root).rglob("*.py")):
            if not path.stem.endswith("_pb2"):
                parts = path.relative_to(root / code_root).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--files", action="store_true", help="name them, with the chain of each leg")
    told = parser.parse_args()
    graph = CallGraph(told.root)
    for walk, legs in WALKS.items():
        chains = [graph.chain(graph.find(first), graph.find(last)) for first, last in legs]
        on_chains = {name for chain in chains for name in chain}
        opened = on_chains | {called for name in on_chains for called in graph.calls(name, certain=True)}
        print(
            f"{walk}: {len({graph.files[name] for name in on_chains})} files on the chains of calls,",
            f"{len({graph.files[name] for name in opened})} with those that they call",
        )
        for chain in chains if told.files else ():
            print("   ", " -> ".join(name.removeprefix("rlhfspec.") for name in chain))


if __name__ == "__main__":
    main()
