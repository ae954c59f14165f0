"""Folder of a run (docs/observability.md): one writer, append-only, readable and resumable at any time.

A resumed run removes half-written data and all steps after its checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import yaml

from rlhfspec.common.folder_lock import locked, take_lock
from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.job import RLHFJob
from rlhfspec.job.file.secrets import holds_secrets
from rlhfspec.messages.records import Sample, Score
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.runs.folder.manifest import RunManifest, RunOutcome, machine
from rlhfspec.runs.folder.same_job import as_content, as_yaml, first_difference, recorded_changes, with_new_fields
from rlhfspec.runs.folder.sample_lines import sample_lines
from rlhfspec.telemetry.folder import TRACES


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """State of a run folder on opening; `missing_steps` precede its checkpoint but have no line."""

    resumed: bool
    resume_at: int = 0
    num_dropped_steps: int = 0  # after the checkpoint; they are repeated
    num_dropped_samples: int = 0
    num_damaged_samples: int = 0  # unreadable lines of trained steps
    missing_steps: tuple[int, ...] = ()
    changed: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)  # (old, new) of fields that change the curve

    def told(self) -> Iterator[str]:
        if not self.resume_at:
            yield "no checkpoint yet: beginning from the first step"
            return
        dropped = self.num_dropped_steps
        again = f"; {dropped} later {'step is' if dropped == 1 else 'steps are'} done again" if dropped else ""
        yield f"resuming after step {self.resume_at}{again}"
        yield from (f"{path} is {new} from here on; it was {old}" for path, (old, new) in self.changed.items())
        if self.missing_steps:
            yield f"steps.jsonl lacks steps {', '.join(map(str, self.missing_steps))}: the curve has a gap there"
        if self.num_damaged_samples:
            yield f"samples.jsonl: {self.num_damaged_samples} damaged lines were left out"


class RunFolder:
    """Writer of a run's files; call `begin` before the first append, `finish` and `close` at the end."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.job_file = self.path / "job.yaml"
        self.steps_file = self.path / "steps.jsonl"
        self.samples_file = self.path / "samples.jsonl"
        self.evaluations_file = self.path / "evaluations.jsonl"
        self.evaluation_samples_file = self.path / "evaluation_samples.jsonl"
        self.feedback_file = self.path / "feedback.jsonl"  # votes on answers of the policy
        self.manifest_file = self.path / "manifest.json"
        self.summary_file = self.path / "summary.md"
        self.checkpoints = self.path / "checkpoints"
        self.plots = self.path / "plots"
        self.events = self.path / "events"
        self.processes = self.path / "processes"  # while a run with processes lasts
        self.logs = self.path / "logs"  # of its processes
        self.export = self.path / "export"
        self.traces = self.path / TRACES
        self._manifest_lock = self.path / ".manifest.lock"
        self._last_step = 0
        self._is_new = False
        self._found: dict[Path, tuple[bytes, bool]] = {}  # job and manifest before `begin`, and whether private
        self._begun = b""  # the manifest after `begin`
        self.lock: int | None = None  # file descriptor; a process that inherits it holds the lock too

    def check(self, job: RLHFJob, *, resume: bool) -> None:
        """Raise the errors of `begin` without changing the folder."""
        self._refuse_unwritable()
        if self.path.is_dir():
            self._refuse_foreign()
            if self.job_file.exists():
                self._refuse_another(as_content(job), resume)

    def begin(self, job: RLHFJob, *, resume: bool, processes: Mapping[str, int] | None = None) -> bool:
        """Create the folder, or open it to resume; return whether an unreadable manifest was replaced."""
        self._make()
        self.check(job, resume=resume)
        found = self.job_file.exists()
        changed = recorded_changes(with_new_fields(self._job_content()), as_content(job)) if found else {}
        self._take_lock()
        before = None
        with suppress(StorageError, OSError):
            before = self.manifest() if found else None
            kept = (self.job_file, self.manifest_file) if found else ()
            self._found = {path: (path.read_bytes(), not path.stat().st_mode & 0o077) for path in kept}
        _write(self.job_file, [as_yaml(job).encode()], private=holds_secrets(job))
        begun = before or RunManifest.begin(job.metadata.name)
        begun = begun.resume(changed) if found else begun
        self._write_manifest(replace(begun, processes=dict(processes or {})))
        self._begun, self._is_new = self.manifest_file.read_bytes(), not found
        return found and before is None

    def hold(self) -> None:
        """Lock the folder that another process began, or raise StorageError if it is locked."""
        try:
            self.lock = take_lock(self.path / ".lock")
        except OSError as error:  # includes BlockingIOError: another process holds it
            raise StorageError(self.path, str(error.strerror)) from error

    def loaded(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the model reports and the machine into the manifest."""
        with self._manifest_alone() as manifest:
            found = {role: dict(report) for role, report in models.items()}
            self._write_manifest(replace(manifest, models=found, machine=machine()))

    def note_export(self, exported: str) -> None:
        with self._manifest_alone() as manifest:
            self._write_manifest(replace(manifest, exported=exported))

    def discard(self) -> None:
        """Undo `begin` unless the manifest has changed since, and remove a new folder without steps."""
        if self._found and self.manifest_file.read_bytes() == self._begun:
            for path, (content, private) in self._found.items():
                _write(path, [content], private=private)
        if not self._is_new or self.steps():
            return
        for path in (self.job_file, self.manifest_file, self._manifest_lock, self.path / ".lock"):
            path.unlink(missing_ok=True)
        for folder in (self.processes, self.logs):
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            self.path.rmdir()

    def go_on_after(self, step: int) -> Opening:
        """Remove the lines after `step`, whose steps are repeated, and return the folder's state."""
        with self._manifest_alone() as before:
            manifest = before.going_on_after(step)
            self._write_manifest(manifest)
        num_later_lines, _ = _keep_up_to(step, self.steps_file)
        num_later_samples, num_damaged_samples = _keep_up_to(step, self.samples_file)
        _keep_up_to(step, self.evaluations_file)
        _keep_up_to(max((run.step for run in self.evaluations()), default=-1), self.evaluation_samples_file)
        there = {json.loads(line)["step"] for line in _whole_lines(self.steps_file)}
        missing = tuple(number for number in range(1, step + 1) if number not in there)
        num_missing_at_the_end = sum(number > max(there, default=0) for number in missing)
        self._last_step = step
        return Opening(
            resumed=step > 0 or manifest.resumed != (),
            resume_at=step,
            num_dropped_steps=max(num_later_lines - num_missing_at_the_end, 0),
            num_dropped_samples=num_later_samples,
            num_damaged_samples=num_damaged_samples,
            missing_steps=missing,
            changed=manifest.resumed[-1].changed if manifest.resumed else {},
        )

    def append_step(self, metrics: StepMetrics) -> None:
        """Append a step's line, after its samples and before its checkpoint."""
        assert metrics.step == self._last_step + 1, f"step {metrics.step} follows step {self._last_step}"
        _append(self.steps_file, metrics.to_line())
        self._last_step = metrics.step

    def append_samples(self, samples: Sequence[Sample], rewards: Mapping[str, Score]) -> None:
        _append(self.samples_file, sample_lines(samples, rewards))

    def append_evaluation(
        self, evaluation: Evaluation, samples: Sequence[Sample] = (), rewards: Mapping[str, Score] | None = None
    ) -> None:
        """Append an evaluation, at most one per step."""
        there = self.evaluations()
        assert not there or evaluation.step > there[-1].step, f"after step {there[-1].step} there was an evaluation"
        _append(self.evaluation_samples_file, sample_lines(samples, rewards or {}))
        _append(self.evaluations_file, evaluation.to_line())

    def append_feedback(self, line: str) -> None:
        """Append a vote. Processes that do not hold the folder's lock may do so too."""
        _append(self.feedback_file, line)

    def write_summary(self, markdown: str) -> None:
        _write(self.summary_file, [markdown.encode()])

    def finish(self, outcome: RunOutcome, reason: str = "") -> None:
        steps = self.steps()
        with self._manifest_alone() as manifest:
            self._write_manifest(manifest.end(outcome, reason, num_steps=steps[-1].step if steps else 0))

    def close(self) -> None:
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def steps(self) -> list[StepMetrics]:
        """Return the metrics of all complete lines, also during the run."""
        return [StepMetrics.from_line(line) for line in _whole_lines(self.steps_file)]

    def evaluations(self) -> list[Evaluation]:
        return [Evaluation.from_line(line) for line in _whole_lines(self.evaluations_file)]

    def samples(self) -> Iterator[dict[str, Any]]:
        return (json.loads(line) for line in _whole_lines(self.samples_file))

    def evaluation_samples(self) -> Iterator[dict[str, Any]]:
        return (json.loads(line) for line in _whole_lines(self.evaluation_samples_file))

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def checkpoint_steps(self) -> list[int]:
        names = (path.name.removeprefix("step-") for path in self.checkpoints.glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def job(self) -> RLHFJob:
        return RLHFJob.model_validate(self._job_content())

    def manifest(self) -> RunManifest:
        try:
            return RunManifest.from_content(json.loads(self.manifest_file.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StorageError(self.manifest_file, f"cannot be read: {error}") from error

    @contextmanager
    def _manifest_alone(self) -> Iterator[RunManifest]:
        with locked(self._manifest_lock):
            yield self.manifest()

    def _refuse_unwritable(self) -> None:
        try:
            there = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
            with tempfile.TemporaryFile(dir=there) as file:
                file.write(bytes(4096))
        except OSError as error:
            verb = "written" if os.path.isdir(self.path) else "made"
            raise InvalidRequest("--out", str(self.path), f"cannot be {verb}: {error.strerror}") from None

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest("--out", str(self.path), f"cannot be made: {error.strerror}") from None

    def _take_lock(self) -> None:
        try:
            self.lock = take_lock(self.path / ".lock")
        except BlockingIOError as error:
            raise InvalidRequest("--out", str(self.path), str(error.strerror)) from None
        except OSError as error:
            raise InvalidRequest("--out", str(self.path), f"cannot be written: {error.strerror}") from None

    def _refuse_foreign(self) -> None:
        """Raise InvalidRequest if the folder holds foreign files and no run."""
        names = {entry.name for entry in self.path.iterdir() if not entry.name.startswith(".")}
        own = [self.job_file, self.steps_file, self.samples_file, self.checkpoints, self.traces]
        own += [self.processes, self.logs]
        foreign = names - {path.name for path in (*own, self.evaluations_file, self.evaluation_samples_file)}
        is_run = self.manifest_file.exists() or (self.job_file.exists() and self.steps_file.exists())
        if foreign and not is_run:
            problem = f"must be empty or hold a run; it holds {min(foreign)}"
            raise InvalidRequest("--out", str(self.path), problem)

    def _refuse_another(self, job: dict[str, Any], resume: bool) -> None:
        before = with_new_fields(self._job_content())
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
            content: dict[str, Any] = dict(yaml.safe_load(self.job_file.read_text()))
        except (OSError, yaml.YAMLError, ValueError, TypeError) as error:
            first, *_ = str(error).splitlines()
            raise InvalidRequest("job.yaml", str(self.job_file), f"cannot be read: {first}") from None
        return content

    def _write_manifest(self, manifest: RunManifest) -> None:
        _write(self.manifest_file, [json.dumps(asdict(manifest), indent=2).encode(), b"\n"])


def _append(path: Path, text: str) -> None:
    """Append the text, truncating partial text on a full disk."""
    data = text.encode()
    with _storage_errors(path):
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


def _write(path: Path, content: Iterable[bytes], *, private: bool = False) -> None:
    """Replace the file atomically, for its owner only if `private`."""
    temporary = path.with_name(f".{path.name}.tmp")
    with _storage_errors(path):
        try:
            with temporary.open("wb") as file:
                if private:
                    os.fchmod(file.fileno(), 0o600)
                file.writelines(content)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _storage_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(path, f"cannot be written: {error.strerror}") from error


def _keep_up_to(step: int, path: Path) -> tuple[int, int]:
    """Remove lines after `step` and damaged ones; return how many lay after, and how many before, the last kept one.

    A truncation needs no space on a full disk and is crash-safe.
    """
    if not path.exists():
        return 0, 0
    with _storage_errors(path), path.open("rb+") as file:
        lines = [(len(line), _is_kept(line, step)) for line in file]
        kept = [is_kept for _, is_kept in lines]
        num_first = len(lines) - kept[::-1].index(True) if any(kept) else 0
        if all(kept[:num_first]):
            file.truncate(sum(length for length, _ in lines[:num_first]))
            os.fsync(file.fileno())
        else:
            file.seek(0)
            _write(path, (line for line in file if _is_kept(line, step)))
    return len(lines) - num_first, kept[:num_first].count(False)


def _is_kept(line: bytes, step: int) -> bool:
    try:
        return line.endswith(b"\n") and bool(json.loads(line)["step"] <= step)
    except (ValueError, KeyError, TypeError):
        return False


def _whole_lines(path: Path) -> Iterator[str]:
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line.decode(errors="replace")
