"""Checks of the files and folders that a job names, before anything is loaded."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlhfspec.errors import InvalidRequest, did_you_mean, nearest
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.drafters import MTP, OFF, ONLY_HEADS_LEARN, is_eagle3, may_run_draft_model
from rlhfspec.job.file.paths import NOT_ROWS, ROW_SUFFIXES, is_local, is_made_here, named_models, resolve
from rlhfspec.job.file.problems import Finding
from rlhfspec.job.file.rules.sources import MODULE_MEMBER
from rlhfspec.job.file.secrets import request_of
from rlhfspec.job.rewards import BUILT_IN_FUNCTIONS, FunctionSource, HttpSource, ModelSource

MOST_HEAD_BYTES = 100 << 20  # the limit of safetensors itself


def check_files(job: RLHFJob, base: Path, *, with_environment: bool = True) -> Iterator[Finding]:
    """Yield findings for missing or wrong paths, relative to `base`; `with_environment` also for unset variables."""
    for name, path in named_models(job.spec.model).items():
        yield from _check_model(path, f"spec.model.{name}", base)
    yield from _check_sizes(job, base)
    yield from _check_mtp(job, base)
    yield from _check_parts(job, base)
    yield from _check_lora(job, base)
    yield from _check_data(job.spec.dataset.path, "spec.dataset.path", base)
    if job.spec.evaluation is not None and job.spec.evaluation.path is not None:
        yield from _check_data(job.spec.evaluation.path, "spec.evaluation.path", base)
    for index, source in enumerate(job.spec.rewards.sources):
        field = f"spec.rewards.sources[{index}]"
        if isinstance(source, ModelSource):
            yield from _check_model(source.path, f"{field}.path", base)
            yield from _check_reward_model(source, field, base)
        if isinstance(source, HttpSource) and with_environment:
            try:
                request_of(source, field)
            except InvalidRequest as error:
                yield Finding(field=error.field, value=error.value, problem=error.problem)
        if isinstance(source, FunctionSource) and MODULE_MEMBER.match(source.function):
            yield from _check_function(source.function, f"{field}.function", base)


def _check_model(path: str, field: str, base: Path) -> Iterator[Finding]:
    if "://" in path:
        yield Finding(field=field, value=path, problem="is a URL: name a folder, or a hub id")
        return
    if not is_local(path, base):
        yield from _check_hub_id(path, field, base)
        return
    folder = Path(resolve(path, base))
    if not folder.exists():
        yield Finding(field=field, value=path, problem=_missing(folder, path))
    elif not folder.is_dir():
        yield Finding(field=field, value=path, problem="must be a folder in Hugging Face format; this is a file")
    elif not (folder / "config.json").exists() and not (folder / "tokenizer_config.json").exists():
        yield Finding(
            field=field, value=path, problem="this folder has no config.json, so it is not a Hugging Face model"
        )
    else:
        yield from _check_readable(folder, path, field)


def _check_readable(place: Path, path: str, field: str) -> Iterator[Finding]:
    """Yield a finding for unreadable files, which safetensors would report as missing."""
    inside = sorted(place.iterdir()) if place.is_dir() and os.access(place, os.R_OK) else []
    for file in [place, *(file for file in inside if file.is_file() and not file.name.startswith("."))]:
        if not os.access(file, os.R_OK):
            yield Finding(field=field, value=path, problem=f"{file} cannot be read by this user")
            return


def _check_reward_model(source: ModelSource, field: str, base: Path) -> Iterator[Finding]:
    config = _config(source.path, base)
    name = str(next(iter(config.get("architectures") or ()), ""))
    if name and not name.endswith("ForSequenceClassification"):
        problem = f"{name} is not a sequence-classification model: it has no trained head"
        yield Finding(field=f"{field}.path", value=source.path, problem=problem)
        return
    num_labels = config.get("num_labels") or len(config.get("id2label", ()))
    if num_labels > 1 and source.label is None:
        problem = f"the model has {num_labels} outputs: set the index of the reward"
        yield Finding(field=f"{field}.label", problem=problem)
    if num_labels and source.label is not None and source.label >= num_labels:
        problem = f"must be < {num_labels}: the model has {num_labels} outputs, counted from 0"
        yield Finding(field=f"{field}.label", value=source.label, problem=problem)


def _check_sizes(job: RLHFJob, base: Path) -> Iterator[Finding]:
    model, drafter = job.spec.model, named_models(job.spec.model).get("drafter")
    config = _text_config(model.path, base)
    if drafter is not None and job.spec.generation.speculation.mode in ("model", "adaptive"):
        theirs, ours = _text_config(drafter, base).get("vocab_size"), config.get("vocab_size")
        if theirs is not None and ours is not None and theirs != ours:
            problem = f"its vocabulary has {theirs} entries, the model's has {ours}: they must be the same"
            yield Finding(field="spec.model.drafter", value=drafter, problem=problem, depends_on=("spec.model.path",))
        learning, theirs = job.spec.generation.speculation.learning, _config(drafter, base)
        if learning != OFF and (theirs or is_made_here(drafter)) and not is_eagle3(theirs):
            field = "spec.generation.speculation.learning"
            yield Finding(field=field, value=learning, problem=ONLY_HEADS_LEARN, depends_on=("spec.model.drafter",))
    limit = config.get("max_position_embeddings") or config.get("n_positions")
    if isinstance(limit, int) and 0 < limit <= job.spec.generation.max_tokens:
        problem = f"the model has {limit} positions, and a prompt needs at least one: must be < {limit}"
        yield Finding(
            field="spec.generation.maxTokens", value=job.spec.generation.max_tokens, problem=problem,
            depends_on=("spec.model.path",),
        )  # fmt: skip


def _check_mtp(job: RLHFJob, base: Path) -> Iterator[Finding]:
    model = job.spec.model
    if model.drafter == MTP and may_run_draft_model(job.spec.generation.speculation.mode):
        names = _parts_of_tensors(Path(resolve(model.path, base)))
        if names and not names & {"eh_proj", "mtp"}:
            problem = "the policy's checkpoint has no MTP layers"
            yield Finding(field="spec.model.drafter", value=MTP, problem=problem, depends_on=("spec.model.path",))


def _check_parts(job: RLHFJob, base: Path) -> Iterator[Finding]:
    """Check that attention heads divide evenly among tensor-parallel ranks."""
    config = _text_config(job.spec.model.path, base)
    for role, count in (
        ("generator", job.spec.roles.generator.tensor_parallel), ("trainer", job.spec.roles.trainer.tensor_parallel),
    ):  # fmt: skip
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = config.get(name)
            if isinstance(heads, int) and heads % count:
                yield Finding(
                    field=f"spec.roles.{role}.tensorParallel", value=count,
                    problem=f"must divide the model's {name} ({heads})", depends_on=("spec.model.path",),
                )  # fmt: skip
                break


def _check_lora(job: RLHFJob, base: Path) -> Iterator[Finding]:
    """Check that the checkpoint has LoRA's target layers, unless it has experts, which are renamed on loading."""
    lora = job.spec.model.lora
    if lora is None or isinstance(lora.target_modules, str):
        return
    names = _parts_of_tensors(Path(resolve(job.spec.model.path, base)))
    wanted = [target.rpartition(".")[2] for target in lora.target_modules]
    if wanted and names and "experts" not in names and not names & set(wanted):
        which = "these names" if len(wanted) > 1 else "this name"
        problem = f"the model has no layer of {which}{did_you_mean(wanted[0], names)}"
        yield Finding(field="spec.model.lora.targetModules", value=wanted, problem=problem)


def _config(path: str, base: Path) -> dict[str, Any]:
    """Return the content of config.json, or {} if it is unreadable, which loading reports."""
    try:
        config = json.loads((Path(resolve(path, base)) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _text_config(path: str, base: Path) -> dict[str, Any]:
    config = _config(path, base)
    return config.get("text_config") or config


def _parts_of_tensors(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in folder.glob("*.safetensors") if folder.is_dir() else ():
        with suppress(OSError, ValueError), file.open("rb") as weights:
            head = json.loads(weights.read(min(int.from_bytes(weights.read(8), "little"), MOST_HEAD_BYTES)))
            names |= {part for name in head for part in name.split(".")}
    return names


def _check_hub_id(path: str, field: str, base: Path) -> Iterator[Finding]:
    """Yield a finding for a hub id that resembles a model folder beside the job."""
    if is_made_here(path) or not base.is_dir():
        return
    first, *rest = path.split("/")
    there = [folder.name for folder in base.iterdir() if folder.joinpath(*rest, "config.json").is_file()]
    near = nearest(first, there, cutoff=0.8)
    if near:
        meant = "/".join([near, *rest])
        problem = f"no such folder; did you mean {meant}? (a hub id has the form owner/name)"
        yield Finding(field=field, value=path, problem=problem)


def _check_data(path: str, field: str, base: Path) -> Iterator[Finding]:
    if "://" in path:
        yield Finding(field=field, value=path, problem="is a URL: download it, and name the file")
        return
    if not is_local(path, base):
        return
    file = Path(resolve(path, base))
    if not file.exists():
        yield Finding(field=field, value=path, problem=_missing(file, path))
    elif not file.is_dir() and not file.is_file():
        yield Finding(field=field, value=path, problem="must be a regular file; this is a pipe or a device")
    elif file.is_file() and not file.name.endswith(ROW_SUFFIXES):
        yield Finding(field=field, value=path, problem=NOT_ROWS)
    else:
        yield from _check_readable(file, path, field)


def _check_function(function: str, field: str, base: Path) -> Iterator[Finding]:
    """Check that a reward function's module beside the job defines it, without running it, or is installed."""
    module, _, name = BUILT_IN_FUNCTIONS.get(function, function).partition(":")
    file = base.joinpath(*module.split(".")).with_suffix(".py")
    top = module.split(".")[0]
    if top in ("__main__", "__mp_main__"):
        problem = f"{top} is the program that runs, not a file: put the function into a module beside the job file"
        yield Finding(field=field, value=function, problem=problem)
    elif file.is_file():
        yield from _check_member(file, name, function, field)
    elif not (base / top).is_dir() and importlib.util.find_spec(top) is None:
        hint = did_you_mean(module, [other.stem for other in base.glob("*.py")])
        problem = f"no module {module}: neither {module}.py beside the job file nor an installed one{hint}"
        yield Finding(field=field, value=function, problem=problem)


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
    hint = did_you_mean(name, names) or f"; it has {', '.join(sorted(names)) or 'none'}"
    yield Finding(field=field, value=function, problem=f"{file.name} has no function {name}{hint}")


def _missing(path: Path, written: str) -> str:
    siblings = [child.name for child in path.parent.iterdir()] if path.parent.is_dir() else []
    near = nearest(path.name, siblings)
    if near:
        return f"no such file or folder; did you mean {written[: len(written.rstrip('/')) - len(path.name)]}{near}?"
    return f"no such file or folder: {path}" + ("" if siblings else " (its folder is missing or empty)")
