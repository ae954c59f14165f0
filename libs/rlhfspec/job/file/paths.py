"""Paths of a job file, relative to its folder.

A text is local if it starts with `.`, `/` or `~`, has two or more slashes, ends like a data file, or exists (or its
first folder does) beside the job file. `tiny:NAME` is made on this machine; all else is a Hugging Face hub id.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhfspec.job import Model, RLHFJob
from rlhfspec.job.choices.drafters import MADE_OF_THE_POLICY, NONE
from rlhfspec.job.rewards import ModelSource

MADE_HERE = re.compile(r"tiny:|reasoning-gym:|smollm2$")  # models and data made on this machine (`rlhfspec.tiny`)
ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz", ".parquet")
NOT_ROWS = "must be a .jsonl, .json or .csv file (also .gz), a .parquet file, or a folder from save_to_disk"
DATA_SUFFIXES = (*ROW_SUFFIXES, ".tsv", ".txt", ".gz")
_MODEL_FIELDS = ("path", "tokenizer", "drafter", "reference", "critic")


def is_made_here(path: str) -> bool:
    return MADE_HERE.match(path) is not None


def is_local(path: str, base: Path) -> bool:
    if is_made_here(path):
        return False
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(("/", *DATA_SUFFIXES)):
        return True
    return (base / path).exists() or ("/" in path and (base / path.partition("/")[0]).is_dir())


def resolve(path: str, base: Path) -> str:
    """Return an absolute local path, or a hub id unchanged."""
    if not is_local(path, base):
        return path
    return os.path.normpath(base.absolute() / Path(path).expanduser())


def named_models(model: Model | Mapping[str, Any]) -> dict[str, Any]:
    """Return each model's folder or hub id by field of spec.model.

    >>> named_models({"path": "./policy", "drafter": "self"})
    {'path': './policy'}
    """
    given = dict(model)
    if given.get("drafter") in (*MADE_OF_THE_POLICY, NONE):
        del given["drafter"]
    return {name: given[name] for name in _MODEL_FIELDS if given.get(name) is not None}


def with_resolved_paths(job: RLHFJob, base: Path) -> RLHFJob:
    model, dataset = job.spec.model, job.spec.dataset
    paths = {name: resolve(path, base) for name, path in named_models(model).items()}
    sources = [
        source.model_copy(update={"path": resolve(source.path, base)}) if isinstance(source, ModelSource) else source
        for source in job.spec.rewards.sources
    ]
    evaluation = job.spec.evaluation
    if evaluation is not None and evaluation.path is not None:
        evaluation = evaluation.model_copy(update={"path": resolve(evaluation.path, base)})
    spec = job.spec.model_copy(
        update={
            "model": model.model_copy(update=paths),
            "dataset": dataset.model_copy(update={"path": resolve(dataset.path, base)}),
            "evaluation": evaluation,
            "rewards": job.spec.rewards.model_copy(update={"sources": sources}),
        }
    )
    return job.model_copy(update={"spec": spec})


def input_paths(spec: Mapping[str, Any], base: Path) -> list[str]:
    """Return the paths that a job reads below and relative to `base`, existing or not."""
    found = (_below(text, base) for text in _named(spec) if isinstance(text, str))
    return list(dict.fromkeys(path for path in found if path))


def _named(spec: Mapping[str, Any]) -> Iterator[Any]:
    yield from named_models(_block(spec, "model")).values()
    yield _block(spec, "dataset").get("path")
    yield _block(spec, "evaluation").get("path")
    sources = _block(spec, "rewards").get("sources")
    for source in sources if isinstance(sources, list) else ():
        if isinstance(source, dict):
            yield source.get("path")
            top = str(source.get("function") or "").partition(":")[0].partition(".")[0]
            yield from (f"{top}.py", top) if top else ()


def _block(spec: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    block = spec.get(name)
    return block if isinstance(block, dict) else {}


def _below(text: str, base: Path) -> str | None:
    """Return the path relative to `base`, or None for anything outside it.

    >>> [_below(text, Path("/storage")) for text in ("/storage/m", "./d.csv", "tiny:sums", "/etc", "../m", "s3://b/m")]
    ['m', 'd.csv', None, None, None, None]
    """
    if is_made_here(text) or text.startswith("~") or "://" in text:
        return None
    path = posixpath.normpath(posixpath.join(str(base), text))
    return posixpath.relpath(path, str(base)) if path.startswith(f"{base}/") else None
