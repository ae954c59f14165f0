"""Checks for errors that would fail a run at load: model names, data rows, functions, packages."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rlhfspec.errors import InvalidRequest, JobError, Problem
from rlhfspec.job import RLHFJob
from rlhfspec.job.choices.engines import ENGINES
from rlhfspec.job.file.paths import is_made_here, named_models

if TYPE_CHECKING:
    from rlhfspec.training.data.rows import Rows


def check_made_here(job: RLHFJob, source: Path) -> None:
    fields = {f"spec.model.{name}": path for name, path in named_models(job.spec.model).items()}
    fields["spec.dataset.path"] = job.spec.dataset.path
    problems = []
    for field, path in fields.items():
        if is_made_here(path):
            from rlhfspec.tiny import check

            try:
                check(path)
            except InvalidRequest as error:
                problems.append(Problem(field=field, value=path, problem=error.problem))
    if problems:
        raise JobError(str(source), problems)


def check_engine(job: RLHFJob) -> None:
    """Raise InvalidRequest if this machine lacks what the engine needs."""
    engine = job.spec.generation.engine
    if missing := ENGINES[engine.name].what_is_missing(engine.arguments):
        raise InvalidRequest("spec.generation.engine.name", engine.name, missing)


def checked_rows(job: RLHFJob) -> Rows | None:
    """Return the checked training rows, or None if the data is not on this machine."""
    from rlhfspec.training.data import load_rows
    from rlhfspec.training.data.prompts import check_rows
    from rlhfspec.training.data.rows import held_out_of

    dataset = job.spec.dataset
    if not Path(dataset.path).is_absolute():
        return None
    rows = load_rows(dataset)
    check_rows(rows, dataset)
    if job.spec.evaluation is not None:
        rows, held_out = held_out_of(rows, job.spec, Path())
        check_rows(held_out, dataset)
    return rows


def check_as_run_does(job: RLHFJob, base: Path, columns: Mapping[str, str] | None) -> None:
    """Raise the error that `run` would raise at load. Imports the user's functions."""
    from rlhfspec.training.scoring.rewards.sources import check_functions

    check_functions(job.spec.rewards, base, columns)
    _check_settings(job)


def check_without_code(job: RLHFJob) -> None:
    """Raise the error that `run` would raise at load, without importing the user's code."""
    training = job.spec.training
    named = (training.optimizer, training.critic_optimizer, training.schedule)
    _check_settings(job, with_training=not any(":" in each.name for each in named))


def _check_settings(job: RLHFJob, *, with_training: bool = True) -> None:
    """Check packages, and with torch the settings of unusual optimizers and schedules."""
    from rlhfspec.runs.folder.trackers import check_packages

    check_packages(job)
    training = job.spec.training
    usual = {"AdamW", "constant", "linear", "cosine"}
    named = (training.optimizer, training.critic_optimizer, training.schedule)
    own = any({each.name} - usual or each.arguments for each in named)
    if own and with_training and find_spec("torch") is not None:
        from rlhfspec.training.learning.optim import check_settings

        check_settings(training)
