"""Where a path in a job file leads: the one place that decides.

Relative paths start at the job file's folder, so a job runs the same from anywhere; `~` is the home folder.
A text is a local path when it starts with `.`, `/` or `~`, has two or more slashes, ends like a data file, or exists
(or its first folder does) beside the job file. `tiny:NAME` is a model or dataset made on this machine
(`rlhfspec.tiny`) and stays as it is. Everything else is a Hugging Face hub id: `name` or `owner/name`.

Example:
    >>> resolve("/data/sums.jsonl", Path("/jobs")), resolve("./m", Path("/jobs")), resolve("owner/name", Path("/jobs"))
    ('/data/sums.jsonl', '/jobs/m', 'owner/name')
"""

from __future__ import annotations

import os
from pathlib import Path

from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.drafters import AUTO
from rlhfspec.job.rewards import ModelSource

MADE_HERE = "tiny:"
ROW_SUFFIXES = (".jsonl", ".json", ".csv", ".jsonl.gz", ".json.gz", ".csv.gz", ".parquet")
NOT_ROWS = "must be a .jsonl, .json or .csv file (or one of them .gz), .parquet, or a folder from save_to_disk"
DATA_SUFFIXES = (*ROW_SUFFIXES, ".tsv", ".txt", ".gz")


MADE_OF_THE_POLICY = ("drafter", AUTO)  # a field of spec.model, and what names no model in it


def is_local(path: str, base: Path) -> bool:
    """Whether the text means a file or folder of this machine rather than a hub id."""
    if path.startswith(MADE_HERE):
        return False
    if path.startswith((".", "/", "~")) or path.count("/") > 1 or path.endswith(("/", *DATA_SUFFIXES)):
        return True
    return (base / path).exists() or ("/" in path and (base / path.partition("/")[0]).is_dir())


def resolve(path: str, base: Path) -> str:
    """An absolute local path, or a hub id unchanged. Resolving twice changes nothing."""
    if not is_local(path, base):
        return path
    return os.path.normpath(base.absolute() / Path(path).expanduser())


def with_resolved_paths(job: RLHFJob, base: Path) -> RLHFJob:
    """The same job, readable from any folder."""
    model, dataset = job.spec.model, job.spec.dataset
    named = {name: getattr(model, name) for name in ("path", "tokenizer", "drafter", "reference", "critic")}
    paths = {
        name: resolve(path, base)
        for name, path in named.items()
        if path is not None and (name, path) != MADE_OF_THE_POLICY
    }
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
