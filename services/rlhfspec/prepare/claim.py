"""Isolation of jobs that share a claim: exclusive run folders and digests of cached models."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rlhfspec.common.folder_lock import locked
from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.job import RLHFJob
from rlhfspec.job.file.paths import named_models
from rlhfspec.job.rewards import ModelSource
from rlhfspec.messages.servers.program import write_secret
from rlhfspec.tiny.recipe import cache_folder

DIGESTS = ".digests.json"  # in the folder of a cached model
_MAX_HASHED_BYTES = 1 << 30  # of larger files only the size is compared


def refuse_shared(folder: Path, base: Path) -> None:
    """Raise InvalidRequest for a run folder that overlaps files of other jobs."""
    cache = cache_folder().parent
    parents = [each for each in folder.parents if base in each.parents]
    inside = [folder, *folder.glob("*"), *folder.glob("processes/*")]
    problem = None
    if folder in (base, base / "runs") or folder.is_relative_to(cache):
        problem = "is shared by all jobs; name a folder within it"
    elif other := next((each for each in parents if (each / "manifest.json").exists()), None):
        problem = f"is inside the run folder {other}"
    elif link := next((each for each in inside if each.is_symlink()), None):
        problem = f"holds a symbolic link: {link}"
    if problem is not None:
        raise InvalidRequest("spec.storage.runFolder", str(folder), problem)


def check_digests(job: RLHFJob) -> None:
    """Compare cached models with the digests of their first use, or record those."""
    models = list(named_models(job.spec.model).values())
    models += [source.path for source in job.spec.rewards.sources if isinstance(source, ModelSource)]
    for folder in set(map(Path, models)):
        if folder.is_relative_to(cache_folder().parent) and folder.is_dir():
            _check_digests(folder)


def _check_digests(folder: Path) -> None:
    noted = folder / DIGESTS
    with locked(folder / f"{DIGESTS}.lock"):
        before: dict[str, str] = json.loads(noted.read_bytes()) if noted.exists() else {}
        files = (file for file in folder.rglob("*") if file.is_file() and not file.name.startswith("."))
        now = {file.relative_to(folder).as_posix(): _digest(file) for file in files}
        if changed := [name for name in before if now.get(name) != before[name]]:
            raise StorageError(folder, f"{min(changed)} was changed after it was cached; delete the folder")
        if now != before:
            write_secret(noted, json.dumps(now, sort_keys=True).encode())


def _digest(file: Path) -> str:
    size = file.stat().st_size
    if size > _MAX_HASHED_BYTES:
        return str(size)
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
