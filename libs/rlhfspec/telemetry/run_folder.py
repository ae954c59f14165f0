"""The folder of a run (docs/run-folder.md): one writer, append-only, always fit to be read or resumed.

A line is there whole or not at all. What a killed run left half-written goes when the run is resumed, together with the
steps after the checkpoint it goes on from, since they are done again.

Example:
    >>> import tempfile
    >>> from rlhfspec.telemetry.metrics import example_step
    >>> with tempfile.TemporaryDirectory() as place, RunFolder(Path(place) / "run") as folder:
    ...     opening = folder.begin(example_job(), resume=False)
    ...     folder.append_step(example_step(step=1))
    ...     [metrics.step for metrics in folder.steps()]
    [1]
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.records import Sample, Score
from rlhfspec.telemetry.manifest import Manifest, Outcome
from rlhfspec.telemetry.metrics import StepMetrics
from rlhfspec.telemetry.same_job import as_content, as_yaml, first_difference
from rlhfspec.telemetry.sample_lines import sample_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a folder was found. `missing_steps` should be there by the checkpoint, and are not: the curve has a gap."""

    resumed: bool
    num_dropped_steps: int = 0
    num_dropped_samples: int = 0
    missing_steps: tuple[int, ...] = ()


class RunFolder:
    """Where things are can be asked at once; `begin` before the first append, `finish` and `close` at the end."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.job_file = self.path / "job.yaml"
        self.steps_file = self.path / "steps.jsonl"
        self.samples_file = self.path / "samples.jsonl"
        self.manifest_file = self.path / "manifest.json"
        self.summary_file = self.path / "summary.md"
        self.checkpoints = self.path / "checkpoints"
        self.plots = self.path / "plots"
        self.events = self.path / "events"
        self.export = self.path / "export"
        self._last_step = 0
        self._lock: int | None = None

    def check(self, job: RLHFJob, *, resume: bool) -> None:
        """What `begin` would refuse of the folder's content, said without touching it: before models are loaded."""
        if self.path.is_dir():
            self._refuse_foreign()
            if self.job_file.exists():
                self._refuse_another(as_content(job), resume)

    def begin(
        self, job: RLHFJob, *, resume: bool, resume_at: int = 0, models: Mapping[str, Mapping[str, Any]] | None = None
    ) -> Opening:
        """Makes the folder, or goes on in it behind step `resume_at` (the checkpoint's; 0: from the start).

        models: of each role how it was found right, for the manifest.
        With `resume` a folder that holds no run yet is begun: a run killed before its first line can be resumed too.
        """
        self._make()
        self.check(job, resume=resume)
        found = self.job_file.exists()
        self._take_lock()
        opening = self._drop_after(resume_at, resumed=found)
        _write(self.job_file, as_yaml(job))
        loaded = {role: dict(report) for role, report in (models or {}).items()}
        begun = self.manifest().resume(resume_at, loaded) if found and self.manifest_file.exists() else None
        self._write_manifest(begun or Manifest.begin(job.metadata.name, loaded))
        return opening

    def append_step(self, metrics: StepMetrics) -> None:
        """After the step's samples, before its checkpoint: then every checkpoint has its lines."""
        assert metrics.step == self._last_step + 1, f"step {metrics.step} follows step {self._last_step}"
        _append(self.steps_file, metrics.to_line())
        self._last_step = metrics.step

    def append_samples(self, samples: Sequence[Sample], rewards: Mapping[str, Score]) -> None:
        """All samples of one step, at once; `rewards` by sample id."""
        _append(self.samples_file, sample_lines(samples, rewards))

    def write_summary(self, markdown: str) -> None:
        _write(self.summary_file, markdown)

    def finish(self, outcome: Outcome, reason: str = "") -> None:
        self._write_manifest(self.manifest().end(outcome, reason, num_steps=self._last_step))

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def steps(self) -> list[StepMetrics]:
        """What is there, also while the run goes on: a line being written is not seen."""
        return [StepMetrics.from_line(line) for line in _whole_lines(self.steps_file)]

    def samples(self) -> Iterator[dict[str, Any]]:
        return (json.loads(line) for line in _whole_lines(self.samples_file))

    def job(self) -> RLHFJob:
        return RLHFJob.model_validate(self._job_content())

    def manifest(self) -> Manifest:
        return Manifest.from_content(json.loads(self.manifest_file.read_text()))

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest("--out", str(self.path), f"cannot be made: {error.strerror}") from None

    def _take_lock(self) -> None:
        """The kernel releases it when the process ends, however it ends."""
        try:
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise InvalidRequest("--out", str(self.path), "another run is writing here") from None
        except OSError as error:
            raise InvalidRequest("--out", str(self.path), f"cannot be written: {error.strerror}") from None

    def _refuse_foreign(self) -> None:
        """The job's own folder has a job.yaml too, but it is no run's: other files lie there, and no manifest."""
        names = {entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")}
        foreign = names - {self.job_file.name, self.steps_file.name, self.samples_file.name, self.checkpoints.name}
        if foreign and not self.manifest_file.exists():
            problem = f"must be empty or hold a run; it holds {min(foreign)}"
            raise InvalidRequest("--out", str(self.path), problem)

    def _refuse_another(self, job: dict[str, Any], resume: bool) -> None:
        before = self._job_content()
        differing = first_difference(before, job)
        if differing is not None:
            field, old, new = differing
            problem = f"holds the run of another job: {field} was {old!r} and is {new!r} now; choose another folder"
            raise InvalidRequest("--out", str(self.path), problem)
        if not resume:
            problem = "holds a run of this job; add --resume to go on with it, or choose another folder"
            raise InvalidRequest("--out", str(self.path), problem)

    def _job_content(self) -> dict[str, Any]:
        try:
            content: dict[str, Any] = yaml.safe_load(self.job_file.read_text())
        except yaml.YAMLError as error:
            raise InvalidRequest("job.yaml", str(self.job_file), f"cannot be read: {error}") from None
        return content

    def _drop_after(self, step: int, *, resumed: bool) -> Opening:
        steps = _cut(self.steps_file, lambda content: content["step"] <= step)
        samples = _cut(self.samples_file, lambda content: content["step"] <= step)
        there = {json.loads(line)["step"] for line in _whole_lines(self.steps_file)}
        self._last_step = step
        return Opening(
            resumed=resumed,
            num_dropped_steps=steps,
            num_dropped_samples=samples,
            missing_steps=tuple(number for number in range(1, step + 1) if number not in there),
        )

    def _write_manifest(self, manifest: Manifest) -> None:
        _write(self.manifest_file, json.dumps(manifest.to_content(), indent=2) + "\n")


def _append(path: Path, text: str) -> None:
    """Whole or not at all: what a full disk took half is taken back."""
    data = text.encode()
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        before = os.fstat(file).st_size
        try:
            while data:
                data = data[os.write(file, data) :]
            os.fsync(file)
        except OSError:
            os.ftruncate(file, before)
            raise
    finally:
        os.close(file)


def _write(path: Path, text: str) -> None:
    """The old file or the new one, never a mixture."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _cut(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Cuts the file before the first line that is torn or not to be kept; how many lines went, a torn one included.

    Lines come in order of their steps, so what stays is a prefix: one truncation, which needs no room on a full disk
    and which a crash cannot leave half done.
    """
    if not path.exists():
        return 0
    kept_bytes, num_dropped = 0, 0
    with path.open("rb+") as file:
        for line in file:
            if num_dropped == 0 and _is_kept(line, keep):
                kept_bytes += len(line)
            else:
                num_dropped += 1
        if num_dropped:
            file.truncate(kept_bytes)
            os.fsync(file.fileno())
    return num_dropped


def _is_kept(line: bytes, keep: Callable[[dict[str, Any]], bool]) -> bool:
    try:
        return line.endswith(b"\n") and keep(json.loads(line))
    except ValueError:
        return False


def _whole_lines(path: Path) -> Iterator[str]:
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line.decode()


def example_job(**training: Any) -> RLHFJob:
    """For examples and tests."""
    return RLHFJob.model_validate(
        {
            "apiVersion": "rlhfspec.io/v1alpha1",
            "kind": "RLHFJob",
            "metadata": {"name": "sums"},
            "spec": {
                "model": {"path": "policy"},
                "dataset": {"path": "sums.jsonl"},
                "rewards": {"sources": [{"type": "function", "function": "rewards:exact"}]},
                "training": training,
            },
        }
    )
