"""Copy of a run folder in an object store: pods fetch what they read at start, and send their changes.

The trainer sends before it acknowledges (`trainer.keeping`); others may lose half a minute of traces and moves.

    >>> import tempfile
    >>> base = Path(tempfile.mkdtemp())
    >>> reads = partial(is_read_by, "reward", 0)
    >>> reads("processes/job.json"), reads("traces/reward-0.jsonl"), reads("steps.jsonl")
    (True, True, False)
    >>> [is_read_by(stage, 0, "drafter/learnt.safetensors") for stage in ("generator", "trainer", "reward")]
    [True, False, False]
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from rlhfspec.cluster.names import CONTROL, PREPARE, TORCH_ROLES
from rlhfspec.common.folder_lock import locked
from rlhfspec.common.object_store import ObjectStore
from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.job.file.paths import input_paths
from rlhfspec.messages.access.connections import Connections
from rlhfspec.runs.folder.learnt import LEARNT
from rlhfspec.stage.base import Service
from rlhfspec.stage.vitals import Vitals
from rlhfspec.telemetry.folder import TRACES

SEND_SECONDS = 30.0
FETCH_PATIENCE_SECONDS = 5.0  # the pod then fails with the reason and restarts
CHECKPOINTS, MANIFEST, MOVES, FEEDBACK = "checkpoints", "manifest.json", "moves.jsonl", "feedback.jsonl"
_WEIGHTS_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_JOB_FILE = "processes/job.json"
_READ_BY = {
    PREPARE: ("job.yaml", "manifest.json", "steps.jsonl"), CONTROL: ("steps.jsonl",), "rebalancer": (MOVES,),
    "gateway": (FEEDBACK,),
}  # fmt: skip
Fingerprint = tuple[int, int, int]
log = logging.getLogger("rlhfspec.stage")


def mirrored(connections: Connections, stage: str, worker: int, *, follows: bool = False) -> Mirror | None:
    """Return this process's mirror with its files fetched, or None if the job uses a claim. `follows`: not rank 0."""
    if connections.storage_uri is None:
        return None
    began = time.monotonic()
    store = ObjectStore(connections.storage_uri, connections.base_folder, patience_seconds=FETCH_PATIENCE_SECONDS)
    mirror = Mirror(store, connections.folder, stage, worker, follows=follows)
    with locked(connections.base_folder / ".fetching"):
        num_bytes = mirror.fetch_run()
        if stage not in (CONTROL, PREPARE):
            num_bytes += mirror.fetch_inputs(connections.job_file)
    log.info("fetched %.1f MB from %s in %.1f s", num_bytes / 1e6, store.uri, time.monotonic() - began)
    mirror.store = ObjectStore(connections.storage_uri, connections.base_folder)
    return mirror


def is_read_by(stage: str, worker: int, name: str) -> bool:
    """Return whether a worker reads the file `name` of the run folder. It never removes other files."""
    top = name.partition("/")[0]
    if top == TRACES:
        return name == f"{TRACES}/{stage}-{worker}.jsonl"
    if stage == "trainer":
        return top not in (MOVES, FEEDBACK, LEARNT, "export", "plots")
    if stage == "generator" and top == LEARNT:
        return True
    return name == _JOB_FILE or name in _READ_BY.get(stage, ())


class Mirror:
    """Copy of a run folder in an object store, used by one process."""

    def __init__(self, store: ObjectStore, folder: Path, stage: str, worker: int, *, follows: bool = False) -> None:
        self.store = store
        self._folder, self._stage = folder, stage
        self._run = store.path_of(folder)
        self._reads = partial(is_read_by, "" if follows else stage, worker)
        self._alone = threading.Lock()
        self._there: dict[str, Fingerprint | None] = {}  # local state of each file in the store

    def fetch_run(self) -> int:
        sizes = {path.removeprefix(f"{self._run}/"): size for path, size in self.store.sizes(self._run).items()}
        read = {name: size for name, size in sizes.items() if self._reads(name)}
        whole = {name: size for name, size in read.items() if _is_whole(name, read)}
        num_bytes = self.store.fetch({f"{self._run}/{name}": size for name, size in whole.items()})
        self._there = {name: _fingerprint(self._folder / name) for name in read}
        return num_bytes

    def fetch_inputs(self, job_file: Path) -> int:
        """Fetch the job's inputs (without torch no weights) and top-level modules; return the number of bytes."""
        sizes = self.store.sizes(*input_paths(_spec_of(job_file), self.store.base))
        modules = {path: size for path, size in self.store.at_the_top().items() if path.endswith(".py")}
        computes = self._stage in TORCH_ROLES and self._stage != PREPARE
        needed = {path: size for path, size in sizes.items() if computes or not path.endswith(_WEIGHTS_SUFFIXES)}
        return self.store.fetch(modules | needed)

    def fetch_traces(self) -> None:
        self.store.fetch(self.store.sizes(f"{self._run}/{TRACES}"))

    def send(self) -> None:
        """Send changed files, manifests of checkpoints last, so that the run can resume from a partial send."""
        with self._alone:
            now = {name: _fingerprint(self._folder / name) for name in _names_in(self._folder)}
            for name in sorted(now, key=_order):
                if now[name] is not None and now[name] != self._there.get(name):
                    self.store.push([self._folder / name])
                    self._there[name] = now[name]
            if self._stage == "trainer":
                gone = sorted(self._there.keys() - now.keys(), key=_order, reverse=True)
                self.store.remove(f"{self._run}/{name}" for name in gone)
                for name in gone:
                    del self._there[name]

    def send_inputs(self, job_file: Path) -> None:
        paths = input_paths(_spec_of(job_file), self.store.base)
        sizes = self.store.sizes(*paths)
        files = [file for path in paths for file in _files_at(self.store.base / path)]
        self.store.push(file for file in files if sizes.get(self.store.path_of(file)) != file.stat().st_size)

    def try_to_send(self) -> None:
        try:
            self.send()
        except (StorageError, InvalidRequest) as error:
            log.warning("traces are not sent: %s", error)

    def last_checkpoint(self) -> int:
        found = self.store.sizes(f"{self._run}/{CHECKPOINTS}")
        steps = [path.split("/")[-2] for path in found if path.endswith(f"/{MANIFEST}")]
        return max((int(step.removeprefix("step-")) for step in steps), default=0)


class Mirroring(Service):
    """Sender of changes. consumes: run folder; produces: object store; waits for: the next time; unblocked by: time."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__("mirror", 0, Vitals())  # not supervised
        self._mirror = mirror

    async def run(self) -> None:
        while not self.stopping.is_set():
            await self.pause("the next time", SEND_SECONDS)
            await self.in_thread(self._mirror.try_to_send)


def _spec_of(job_file: Path) -> Mapping[str, object]:
    """Return the job file's spec, or {} if missing or invalid."""
    try:
        spec = json.loads(job_file.read_bytes())["spec"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return spec if isinstance(spec, dict) else {}


def _is_whole(name: str, there: Mapping[str, int]) -> bool:
    """Return whether a file belongs to no checkpoint, or to a complete one, whose manifest is `there`.

    >>> _is_whole("checkpoints/step-00000002/state.json", {"checkpoints/step-00000001/manifest.json": 7})
    False
    """
    top, _, rest = name.partition("/")
    return top != CHECKPOINTS or f"{top}/{rest.partition('/')[0]}/{MANIFEST}" in there


def _order(name: str) -> tuple[int, str]:
    """Return the sort key for sending: checkpoints last, their manifests at the end.

    >>> sorted(["checkpoints/step-1/manifest.json", "checkpoints/step-1/state.json", "steps.jsonl"], key=_order)
    ['steps.jsonl', 'checkpoints/step-1/state.json', 'checkpoints/step-1/manifest.json']
    """
    is_of_checkpoint = name.startswith(f"{CHECKPOINTS}/")
    return (is_of_checkpoint + (is_of_checkpoint and name.endswith(f"/{MANIFEST}")), name)


def _names_in(folder: Path) -> list[str]:
    return [file.relative_to(folder).as_posix() for file in _files_at(folder)]


def _files_at(path: Path) -> Iterator[Path]:
    if path.is_file():
        yield path
    for place, folders, files in os.walk(path):
        folders[:] = sorted(folder for folder in folders if not folder.startswith("."))
        yield from (Path(place, name) for name in sorted(files) if not name.startswith("."))


def _fingerprint(file: Path) -> Fingerprint | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
