"""TensorBoard's reader finds reported values; wandb gets the same, without secrets."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from example_records import example_evaluation
from run_folders import example_job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhfspec.errors import InvalidRequest
from rlhfspec.job import RLHFJob
from rlhfspec.messages.records.metrics import MEASUREMENTS, example_step
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.folder.same_job import as_content
from rlhfspec.runs.folder.trackers import Trackers, check_packages, scalars


def a_job(**observability: Any) -> RLHFJob:
    content = as_content(example_job(steps=9))
    content["spec"]["observability"] |= observability
    source = {"type": "http", "url": "https://rewards.example", "headers": {"Authorization": "Bearer 0123-abc"}}
    content["spec"]["rewards"]["sources"] = [source]
    return RLHFJob.model_validate(content)


def a_folder(path: Path, job: RLHFJob, *, resume_at: int = 0) -> RunFolder:
    folder = RunFolder(path)
    folder.begin(job, resume=resume_at > 0)
    folder.go_on_after(resume_at)
    return folder


def read(folder: RunFolder) -> EventAccumulator:
    return EventAccumulator(str(folder.events), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def test_scalars_are_all_numbers_of_a_line() -> None:
    numbers = scalars(replace(example_step(), reward_by_column={"sums": 0.5}, num_by_column={"sums": 4.0}))
    assert {"kl/k3", "training/policy_loss", "reward_components/exact", "strategy/plain"} <= set(numbers)
    assert "training/value_loss" not in numbers, "null is not a number"
    assert numbers["expert_rows/model.layers.0.mlp.experts/max_over_mean"] == 1.5, "60 rows, the mean is 40"
    assert not any("unix" in name or "digest" in name or "edges" in name for name in numbers)
    measured = {name for name in MEASUREMENTS if "unix" not in name}
    assert all(any(name in path for path in numbers) for name in measured)


def test_tensorboard_reads_what_was_reported(tmp_path: Path) -> None:
    job = a_job(tensorboard=True)
    with a_folder(tmp_path, job) as folder, Trackers(job, folder) as trackers:
        for step in (1, 2, 3):
            trackers.step(example_step(step=step, reward=step / 4))
            assert [point.step for point in read(folder).Scalars("reward/mean")] == list(range(1, step + 1)), "at once"
    events = read(folder)
    assert [(point.step, point.value) for point in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert set(events.Tags()["scalars"]) == set(scalars(example_step()))
    with a_folder(tmp_path / "evaluated", job) as folder, Trackers(job, folder) as trackers:
        trackers.evaluation(example_evaluation(step=10, reward=0.75))
    assert [(point.step, point.value) for point in read(folder).Scalars("evaluation/reward/mean")] == [(10, 0.75)]
    (*_, last) = events.Histograms("response_length/histogram")
    assert sum(last.histogram_value.bucket) == 4
    assert events.Scalars("kl/k3")[0].wall_time == example_step(step=1).finished_unix_seconds


def test_tensorboard_forgets_the_steps_that_are_done_again(tmp_path: Path) -> None:
    job = a_job(tensorboard=True)
    with a_folder(tmp_path, job) as folder, Trackers(job, folder) as trackers:
        for step in (1, 2, 3, 4):
            folder.append_step(example_step(step=step))
            trackers.step(example_step(step=step))
    with a_folder(tmp_path, job, resume_at=2) as folder, Trackers(job, folder, resume_at=2) as trackers:
        trackers.step(example_step(step=3, reward=0.75))
    points = [(point.step, point.value) for point in read(folder).Scalars("reward/mean")]
    assert points == [(1, 0.5), (2, 0.5), (3, 0.75)]


def test_without_trackers_no_events_are_written(tmp_path: Path) -> None:
    with a_folder(tmp_path, a_job()) as folder, Trackers(a_job(), folder) as trackers:
        trackers.step(example_step())
    assert not folder.events.exists()


@pytest.mark.parametrize(
    ("observability", "package", "field"),
    [
        ({"wandb": {"project": "sums"}}, "wandb", r"observability\.wandb.*pip install wandb"),
        ({"tensorboard": True}, "tensorboard", r"observability\.tensorboard.*pip install tensorboard"),
    ],
)
def test_a_missing_package_is_named_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, observability: dict[str, Any], package: str, field: str
) -> None:
    def find(name: str) -> object:
        return None if name == package else object()

    monkeypatch.setattr("rlhfspec.runs.folder.trackers.find_spec", find)
    with pytest.raises(InvalidRequest, match=field):
        check_packages(a_job(**observability))


class _Wandb(ModuleType):
    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__("wandb")
        self.Settings = dict
        self.errors = SimpleNamespace(Error=type("Error", (Exception,), {}))
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int | None, dict[str, float]]] = []
        self.steps_of: dict[str, str] = {}
        self.num_finished = 0
        self.refuses = refuses

    def init(self, **given: Any) -> "_Wandb":
        if self.refuses:
            raise self.errors.Error("api_key not configured")
        self.begun.append(given)
        return self

    def define_metric(self, name: str, *, step_metric: str) -> None:
        self.steps_of[name] = step_metric

    def log(self, numbers: dict[str, float], *, step: int | None = None, commit: bool = True) -> None:
        assert commit == (step is not None), "a row without a step goes out with the next one that has it"
        self.logged.append((step, numbers))

    def finish(self) -> None:
        self.num_finished += 1


def test_wandb_gets_the_numbers_and_no_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = _Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    job = a_job(wandb={"project": "sums"})
    with a_folder(tmp_path, job) as folder, Trackers(job, folder) as trackers:
        trackers.step(example_step(step=1))
        trackers.evaluation(example_evaluation(step=1, reward=0.5))
    with a_folder(tmp_path, job, resume_at=1) as folder, Trackers(job, folder, resume_at=1):
        pass
    first, second = wandb.begun
    assert first["project"] == "sums"
    assert first["id"] == second["id"], "a resumed run goes on in the same run of theirs"
    assert "0123-abc" not in str(first)
    assert wandb.logged[0] == (1, scalars(example_step(step=1)))
    assert wandb.steps_of == {"evaluation/*": "evaluation/step"}
    (step, evaluation), *rest = wandb.logged[1:]
    assert (step, evaluation["evaluation/step"], evaluation["evaluation/reward/mean"], rest) == (None, 1, 0.5, [])
    assert wandb.num_finished == 2


def test_wandb_that_refuses_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", _Wandb(refuses=True))
    job = a_job(wandb={"project": "sums"})
    said = r"observability\.wandb: .*api_key not configured.*wandb login"
    with a_folder(tmp_path, job) as folder, pytest.raises(InvalidRequest, match=said):
        Trackers(job, folder)
