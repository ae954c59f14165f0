"""Reporting of step metrics to TensorBoard and Weights & Biases."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any, Protocol, Self

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob, Wandb
from rlhfspec.job.file.secrets import shown_value
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import StepMetrics
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.folder.same_job import as_content

_NOT_PLOTTED = ("step", "started_unix_seconds", "finished_unix_seconds")


class Tracker(Protocol):
    def step(self, metrics: StepMetrics) -> None: ...

    def evaluation(self, evaluation: Evaluation) -> None:
        """Report an evaluation; steps after it may have been reported already."""

    def close(self) -> None: ...


class Trackers:
    """Trackers of a job; steps after `resume_at` replace those of an earlier run."""

    def __init__(self, job: RLHFJob, folder: RunFolder, *, resume_at: int = 0) -> None:
        observability = job.spec.observability
        self._trackers: list[Tracker] = []
        if observability.tensorboard:
            self._trackers.append(TensorBoard(folder, resume_at=resume_at))
        if observability.wandb is not None:
            self._trackers.append(WeightsAndBiases(observability.wandb, job, folder))

    def step(self, metrics: StepMetrics) -> None:
        for tracker in self._trackers:
            tracker.step(metrics)

    def evaluation(self, evaluation: Evaluation) -> None:
        for tracker in self._trackers:
            tracker.evaluation(evaluation)

    def close(self) -> None:
        with ExitStack() as closing:
            for tracker in self._trackers:
                closing.callback(tracker.close)
        self._trackers = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def check_packages(job: RLHFJob) -> None:
    """Raise InvalidRequest if a package that the job's trackers or OTLP export need is missing."""
    observability = job.spec.observability
    if observability.tensorboard and find_spec("tensorboard") is None:
        raise _missing("spec.observability.tensorboard", True, "tensorboard")
    if observability.wandb is not None and find_spec("wandb") is None:
        raise _missing("spec.observability.wandb", observability.wandb.project, "wandb")
    if observability.otlp_endpoint is not None and find_spec("opentelemetry") is None:
        raise _missing("spec.observability.otlpEndpoint", observability.otlp_endpoint, "'rlhfspec[processes]'")


class TensorBoard:
    """Writer of event files, for `tensorboard --logdir DIR/events`."""

    def __init__(self, folder: RunFolder, *, resume_at: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder.events), purge_step=resume_at + 1 if resume_at else None)

    def step(self, metrics: StepMetrics) -> None:
        lengths, at = metrics.response_length, {"global_step": metrics.step, "walltime": metrics.finished_unix_seconds}
        num = sum(lengths.histogram)
        self._writer.add_histogram_raw(
            "response_length/histogram", lengths.min, lengths.max, num, lengths.mean * num, 0.0, lengths.edges[1:],
            lengths.histogram, **at,
        )  # fmt: skip
        self._write(scalars(metrics), **at)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._write(evaluation_scalars(evaluation), global_step=evaluation.step)

    def _write(self, numbers: Mapping[str, float], **at: Any) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, **at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Reporter of one W&B run per run folder."""

    def __init__(self, wanted: Wandb, job: RLHFJob, folder: RunFolder) -> None:
        import wandb

        begun = f"{job.metadata.name}:{folder.manifest().started}"
        try:
            self._run = wandb.init(
                project=wanted.project,
                entity=wanted.entity,
                name=job.metadata.name,
                id=hashlib.blake2b(begun.encode(), digest_size=8).hexdigest(),
                resume="allow",
                dir=str(folder.path),
                config=shown_value((), as_content(job)),
                settings=wandb.Settings(console="off"),  # the live view owns the terminal
            )
        except wandb.errors.Error as error:
            problem = f"wandb does not start ({error}); log in with `wandb login`, or leave the field out"
            raise InvalidRequest("spec.observability.wandb", wanted.project, problem) from None
        self._run.define_metric("evaluation/*", step_metric="evaluation/step")  # W&B's own step may be further already

    def step(self, metrics: StepMetrics) -> None:
        self._run.log(scalars(metrics), step=metrics.step)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._run.log({"evaluation/step": evaluation.step} | evaluation_scalars(evaluation), commit=False)

    def close(self) -> None:
        self._run.finish()


def scalars(metrics: StepMetrics) -> dict[str, float]:
    """Return every number of a step's metrics by its path; top-level numbers are under `training/`."""
    content = {name: value for name, value in asdict(metrics).items() if name not in _NOT_PLOTTED}
    content["expert_rows"] = {
        layer: {"max_over_mean": max(rows) * len(rows) / max(sum(rows), 1)}
        for layer, rows in metrics.expert_rows.items()
    }
    return {path if "/" in path else f"training/{path}": value for path, value in _numbers(content, "")}


def _numbers(content: Mapping[str, Any], path: str) -> Iterator[tuple[str, float]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{path}{name}/")
        elif isinstance(value, int | float):
            yield path + name, float(value)


def evaluation_scalars(evaluation: Evaluation) -> dict[str, float]:
    content = {name: value for name, value in asdict(evaluation).items() if name != "step"}
    return dict(_numbers(content, "evaluation/"))


def _missing(field: str, value: object, package: str) -> InvalidRequest:
    return InvalidRequest(field, value, f"needs a package: pip install {package}, or leave the field out")
