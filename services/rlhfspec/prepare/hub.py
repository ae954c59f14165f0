"""Hugging Face hub models, fetched once by `prepare` into the cache of all pods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from rlhfspec.errors import InvalidRequest, StorageError, first_line
from rlhfspec.job import RLHFJob
from rlhfspec.job.file.paths import is_made_here, named_models
from rlhfspec.job.rewards import ModelSource

# Weight formats that are not read, and files beside the model.
NOT_READ = ["*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.tflite", "original/*"]
OLDER = "*.bin"  # only older models have no safetensors instead


def with_hub_models(job: RLHFJob, report: Callable[[str], None]) -> RLHFJob:
    """Return the job with local folders for hub ids. Raise InvalidRequest, or StorageError if the hub is absent."""
    model, rewards = job.spec.model, job.spec.rewards
    folders = {
        name: _fetched(path, f"spec.model.{name}", report)
        for name, path in named_models(model).items()
        if _is_hub_id(path)
    }
    sources = list(rewards.sources)
    for number, source in _reward_models(job):
        folder = _fetched(source.path, f"spec.rewards.sources[{number}].path", report)
        sources[number] = source.model_copy(update={"path": folder})
    changes = {"model": model.model_copy(update=folders), "rewards": rewards.model_copy(update={"sources": sources})}
    return job.model_copy(update={"spec": job.spec.model_copy(update=changes)})


def _is_hub_id(path: str) -> bool:
    """Return whether a model path is a hub id.

    >>> _is_hub_id("owner/name"), _is_hub_id("/storage/models/mine"), _is_hub_id("tiny:sums")
    (True, False, False)
    """
    return not is_made_here(path) and not Path(path).is_absolute()


def _reward_models(job: RLHFJob) -> Iterator[tuple[int, ModelSource]]:
    for number, source in enumerate(job.spec.rewards.sources):
        if isinstance(source, ModelSource) and _is_hub_id(source.path):
            yield number, source


def _fetched(hub_id: str, field: str, report: Callable[[str], None]) -> str:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

    report(f"fetching {hub_id} from the hub, unless it is cached")
    try:
        folder = snapshot_download(hub_id, ignore_patterns=[*NOT_READ, OLDER])
        if any(Path(folder).glob("*.safetensors")):
            return folder
        return snapshot_download(hub_id, ignore_patterns=NOT_READ)
    except (HFValidationError, RepositoryNotFoundError) as error:
        problem = f"is neither a folder in the job's storage nor an accessible model on the hub: {first_line(error)}"
        raise InvalidRequest(field, hub_id, problem) from error
    except LocalEntryNotFoundError as error:
        problem = (
            f"{field} is not a folder in the job's storage, and the hub cannot be reached; write a folder as ./NAME"
        )
        raise StorageError(hub_id, problem) from error
    except OSError as error:
        raise StorageError(hub_id, f"{field} cannot be fetched from the hub: {first_line(error)}") from error
