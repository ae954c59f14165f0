"""Reading of a job file into an RLHFJob."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlhfspec.errors import JobError, Problem
from rlhfspec.job import API_VERSION, RLHFJob
from rlhfspec.job.file.checks import check
from rlhfspec.job.file.files import check_files
from rlhfspec.job.file.memory import check_memory
from rlhfspec.job.file.paths import with_resolved_paths
from rlhfspec.job.file.problems import explain
from rlhfspec.job.file.secrets import shown_override
from rlhfspec.job.file.yaml_text import Path_, child_of, dotted, parse, parse_value, parts_of, read_text


def read_job(path: Path, overrides: Sequence[str] = (), *, base: Path | None = None, runs_here: bool = True) -> RLHFJob:
    """Read and check a job file, with absolute paths, or raise JobError with all problems.

    `overrides`: texts `path=value` of `--set`; later ones win. `base`: folder of relative paths, by default the file's.
    `runs_here`: also check this machine's memory and environment.
    """
    base = path.parent if base is None else base
    document = parse(read_text(path), source=str(path))
    places: dict[Path_, str] = {where: f"line {line}" for where, line in document.lines.items()}
    if not isinstance(document.value, dict):
        kind = "a list" if isinstance(document.value, list) else "one value"
        raise JobError(str(path), [Problem(field="file", problem=f"must be a mapping with apiVersion ..., not {kind}")])
    problems = list(document.problems)
    for override in overrides:
        problems += _override(document.value, places, override)
    job, found = _validate(document.value, places, base, runs_here)
    problems += found
    if problems or job is None:
        raise JobError(str(path), _in_order(problems))
    return with_resolved_paths(job, base)


def _validate(
    value: dict[str, Any], places: dict[Path_, str], base: Path, runs_here: bool
) -> tuple[RLHFJob | None, list[Problem]]:
    """Return (job or None, problems) of fields, then combinations of valid fields."""
    job, problems, wrong = None, list[Problem](), set[str]()
    try:
        job = RLHFJob.model_validate(value)
    except ValidationError as error:
        problems, wrong_paths = explain(error, value, places)
        wrong = set(map(dotted, wrong_paths))
        job = _without(value, wrong_paths)
    if job is not None:
        memory = check_memory(job, base) if runs_here else ()
        for finding in [*check(job), *check_files(job, base, with_environment=runs_here), *memory]:
            if wrong.isdisjoint((finding.field, *finding.depends_on)):
                problems.append(finding.as_problem(places))
    return (None if problems else job), problems


def _without(value: Any, wrong_paths: Sequence[Path_]) -> RLHFJob | None:
    """Return the job without its wrong fields, or None if they are required."""
    pruned = deepcopy(value)
    for path in sorted(wrong_paths, key=len, reverse=True):
        holder = pruned
        for part in path[:-1]:
            holder = child_of(holder, part)
        if isinstance(holder, dict) and path:
            holder.pop(path[-1], None)
    pruned = {"apiVersion": API_VERSION, "kind": "RLHFJob", **pruned}
    pruned["metadata"] = {"name": "unnamed"} | (pruned.get("metadata") or {})
    try:
        return RLHFJob.model_validate(pruned)
    except ValidationError:
        return None


def _override(job: dict[str, Any], places: dict[Path_, str], override: str) -> list[Problem]:
    """Apply one `path=value` to the job and return problems; the schema is checked later."""
    name, equals, text = override.partition("=")
    where = f"--set {shown_override(override)}"
    keys = parts_of(name.strip().removeprefix("spec."))
    field = dotted(("spec", *keys))
    if not equals or "" in keys:
        return [Problem(field="--set", value=shown_override(override), problem="must look like training.steps=3")]
    try:
        value = parse_value(text)
    except JobError as error:
        return [Problem(field=field, problem=error.problem, where=where)]
    path: Path_ = ("spec",)
    holder: Any = _step_into(job, "spec")
    for key in keys[:-1]:
        holder, path = _step_into(holder, key), (*path, _key(holder, key))
        places.setdefault(path, where)
    if not _put(holder, keys[-1], value):
        at = f"is a list of {len(holder)}" if isinstance(holder, list) else "is not a block with fields"
        return [Problem(field=field, problem=f"{dotted(path)} {at}", where=where)]
    full = (*path, _key(holder, keys[-1]))
    for old in [place for place in places if place[: len(full)] == full]:
        del places[old]
    places[full] = where
    return []


def _key(holder: Any, key: str | int) -> str | int:
    return key if isinstance(holder, list) else str(key)


def _step_into(holder: Any, key: str | int) -> Any:
    if isinstance(holder, dict) and holder.get(str(key)) is None:
        holder[str(key)] = {}
    return child_of(holder, key)


def _put(holder: Any, key: str | int, value: Any) -> bool:
    if isinstance(holder, list) and not (isinstance(key, int) and key < len(holder)):
        return False
    if isinstance(holder, dict | list):
        holder[_key(holder, key)] = value  # type: ignore[index]
        return True
    return False


def _in_order(problems: Sequence[Problem]) -> list[Problem]:
    def line(problem: Problem) -> int:
        return int(problem.where.removeprefix("line ")) if problem.where.startswith("line ") else 0

    return sorted(problems, key=line)
