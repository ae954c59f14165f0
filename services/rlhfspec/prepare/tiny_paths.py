"""Replacement of `tiny:NAME` in a job by the folder or file made on this machine."""

from __future__ import annotations

from collections.abc import Callable

from rlhfspec.common.object_store import ObjectStore
from rlhfspec.job import RLHFJob
from rlhfspec.job.file.paths import is_made_here, named_models

LAST_SENT = "tokenizer_config.json"  # last file stored of a made model, so it implies all others


def fetch_made(job: RLHFJob, store: ObjectStore) -> None:
    """Fetch the job's models from the store, if earlier jobs made them."""
    from rlhfspec.tiny.paths import model_folder

    for path in named_models(job.spec.model).values():
        folder = model_folder(path)
        if folder is not None and folder.is_relative_to(store.base):
            sizes = store.sizes(store.path_of(folder))
            if store.path_of(folder / LAST_SENT) in sizes:
                store.fetch(sizes)


def with_tiny_paths(job: RLHFJob, report: Callable[[str], None]) -> RLHFJob:
    model, dataset = job.spec.model, job.spec.dataset
    evaluation = job.spec.evaluation
    if evaluation is not None and evaluation.path is not None:
        evaluation = evaluation.model_copy(update={"path": made(evaluation.path, report)})
    paths = {name: made(path, report) for name, path in named_models(model).items()}
    spec = job.spec.model_copy(
        update={
            "model": model.model_copy(update=paths),
            "dataset": dataset.model_copy(update={"path": made(dataset.path, report)}),
            "evaluation": evaluation,
        }
    )
    return job.model_copy(update={"spec": spec})


def made(path: str, report: Callable[[str], None]) -> str:
    """Return the folder of a model or the file of a dataset that this machine makes; any other path as it is."""
    if not is_made_here(path):
        return path
    from rlhfspec.tiny.paths import resolve

    return resolve(path, report)
