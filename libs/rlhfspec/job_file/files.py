"""Do the files and folders exist that a job names? Asked before anything is loaded, answered with the field.

Example:
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "train.jsonl").write_text("")
    >>> [finding.problem for finding in _check_data("./tain.jsonl", folder)]
    ['no such file or folder; did you mean ./train.jsonl?']
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from rlhfspec.job import FunctionSource, ModelSource, RLHFJob
from rlhfspec.job_file.checks import Finding
from rlhfspec.job_file.paths import is_local, resolve

MODEL_FIELDS = ("path", "tokenizer", "drafter", "reference", "critic")


def check_files(job: RLHFJob, base: Path) -> Iterator[Finding]:
    """base: the job file's folder."""
    for name in MODEL_FIELDS:
        path = getattr(job.spec.model, name)
        if path is not None:
            yield from _check_model(path, f"spec.model.{name}", base)
    yield from _check_data(job.spec.dataset.path, base)
    for index, source in enumerate(job.spec.rewards.sources):
        field = f"spec.rewards.sources.{index}"
        if isinstance(source, ModelSource):
            yield from _check_model(source.path, f"{field}.path", base)
        if isinstance(source, FunctionSource) and source.function.count(":") == 1:
            yield from _check_function(source.function, f"{field}.function", base)


def _check_model(path: str, field: str, base: Path) -> Iterator[Finding]:
    if not is_local(path, base):
        return
    folder = Path(resolve(path, base))
    if not folder.exists():
        yield Finding(field=field, value=path, problem=_missing(folder, path))
    elif not folder.is_dir():
        yield Finding(field=field, value=path, problem="must be a folder in Hugging Face form; this is a file")
    elif not (folder / "config.json").exists() and not (folder / "tokenizer_config.json").exists():
        yield Finding(
            field=field, value=path, problem="this folder holds no config.json: not a model in Hugging Face form"
        )


def _check_data(path: str, base: Path) -> Iterator[Finding]:
    field = "spec.dataset.path"
    if not is_local(path, base):
        return
    file = Path(resolve(path, base))
    if not file.exists():
        yield Finding(field=field, value=path, problem=_missing(file, path))
    elif file.is_file() and file.suffix not in (".jsonl", ".parquet"):
        yield Finding(
            field=field, value=path, problem="must be a .jsonl or .parquet file, or a folder from save_to_disk"
        )


def _check_function(function: str, field: str, base: Path) -> Iterator[Finding]:
    """Reads a module beside the job without running it; any other is only looked for."""
    module, _, name = function.partition(":")
    file = base.joinpath(*module.split(".")).with_suffix(".py")
    if file.is_file():
        yield from _check_member(file, name, function, field)
    elif not (base / module.split(".")[0]).is_dir() and importlib.util.find_spec(module.split(".")[0]) is None:
        near = difflib.get_close_matches(module, [other.stem for other in base.glob("*.py")], n=1)
        problem = f"no module {module}: neither {module}.py beside the job file nor an installed one"
        yield Finding(field=field, value=function, problem=problem + (f"; did you mean {near[0]}?" if near else ""))


def _check_member(file: Path, name: str, function: str, field: str) -> Iterator[Finding]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError) as error:
        yield Finding(field=field, value=function, problem=f"{file.name} is not Python: {error}")
        return
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    imported = {
        a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom | ast.Import) for a in n.names
    }
    if name in names | bound | imported or "*" in imported:
        return
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; it has {', '.join(sorted(names)) or 'none'}"
    yield Finding(field=field, value=function, problem=f"{file.name} has no function {name}{hint}")


def _missing(path: Path, written: str) -> str:
    siblings = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    if near:
        return f"no such file or folder; did you mean {written[: len(written.rstrip('/')) - len(path.name)]}{near[0]}?"
    return f"no such file or folder: {path}" + ("" if siblings else " (nor the folder it would be in)")
