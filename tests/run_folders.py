"""Run folders with steps in them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import example_records
from invalid_jobs import JOB

from rlhfspec.job import RLHFJob
from rlhfspec.messages.records import Sample, Score
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.runs.folder.run_folder import Opening, RunFolder


def example_job(**training: Any) -> RLHFJob:
    own = {"model": {"path": "policy"}, "dataset": {"path": "sums.jsonl"}, "training": training}
    return RLHFJob.model_validate(JOB | {"spec": JOB["spec"] | own})


def example_sample(*, log_probs: Sequence[float] = (-0.5,), **fields: Any) -> Sample:
    return example_records.example_sample(log_probs=log_probs, num_verifications=1, num_accepted=1, **fields)


def reward_of(sample: Sample, value: float = 1.0, error: str = "") -> Score:
    return Score(
        id=f"{sample.id}/reward", sample_id=sample.id, job=sample.job, step=sample.step, stage="reward",
        values=() if error else (value,), components=(("exact", value),), error=error,
    )  # fmt: skip


def write_steps(folder: RunFolder, steps: range) -> None:
    for step in steps:
        samples = [example_sample(step=step, prompt=prompt) for prompt in (2, 0, 10, 1)]
        folder.append_samples(samples, {sample.id: reward_of(sample) for sample in samples})
        folder.append_step(example_step(step=step))


def begin(folder: RunFolder, job: RLHFJob, *, resume: bool, resume_at: int = 0) -> Opening:
    folder.begin(job, resume=resume)
    return folder.go_on_after(resume_at)


def a_run(path: Path, num_steps: int = 5, **training: Any) -> RunFolder:
    with RunFolder(path) as folder:
        begin(folder, example_job(**training), resume=False)
        write_steps(folder, range(1, num_steps + 1))
    return folder
