"""A run folder mirrored in an object store: a successor finds all that was acknowledged."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from rlhfspec.common.object_store import ObjectStore
from rlhfspec.errors import StorageUnavailable
from rlhfspec.training.checkpoint import CheckpointStore
from rlhfspec.worker.mirror import Mirror

RUN = "runs/sums"
pytestmark = pytest.mark.usefixtures("object_credentials")


class Dies(ObjectStore):
    """Store that fails after a number of uploads and removals."""

    left = 1_000_000

    def push(self, files: object) -> int:
        self._one_more()
        return super().push(files)  # type: ignore[arg-type]

    def remove(self, paths: object) -> None:
        for path in paths:  # type: ignore[attr-defined]
            self._one_more()
            super().remove([path])

    def _one_more(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise StorageUnavailable(self.uri, "killed")


def mirror_at(base: Path, prefix: str, stage: str = "trainer", worker: int = 0) -> Mirror:
    (base / RUN).mkdir(parents=True, exist_ok=True)
    return Mirror(Dies(f"s3://bucket/{prefix}", base), base / RUN, stage, worker)


def train(folder: Path, checkpoints: CheckpointStore, step: int) -> None:
    for name in ("samples.jsonl", "steps.jsonl"):
        with (folder / name).open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
    checkpoints.save(step, {"learner": {"step": step, "weights": [step] * 50}})


@settings(max_examples=12, deadline=None)
@given(steps=st.integers(2, 4), dies_after=st.integers(0, 14))
def test_a_run_goes_on_after_a_trainer_died_while_it_uploaded(steps: int, dies_after: int) -> None:
    with tempfile.TemporaryDirectory() as place:
        prefix, first, second = Path(place).name, Path(place, "first"), Path(place, "second")
        mirror, acknowledged = mirror_at(first, prefix), 0
        with CheckpointStore(first / RUN / "checkpoints", keep=1) as checkpoints:
            for step in range(1, steps + 1):
                train(first / RUN, checkpoints, step)
                if step == steps:
                    mirror.store.left = dies_after  # type: ignore[attr-defined]
                try:
                    mirror.send()
                except StorageUnavailable:
                    continue
                acknowledged = step
        after = mirror_at(second, prefix)
        after.fetch_run()
        with CheckpointStore(second / RUN / "checkpoints", keep=1) as checkpoints:
            latest = checkpoints.latest()
            assert latest >= acknowledged
            assert checkpoints.load(latest)["learner"]["weights"] == [latest] * 50
            for name in ("samples.jsonl", "steps.jsonl"):
                assert int(json.loads(((second / RUN) / name).read_text().splitlines()[-1])["step"]) >= latest
            train(second / RUN, checkpoints, steps + 1)
        after.send()
        there = {path.removeprefix(f"{RUN}/checkpoints/").split("/")[0]
                 for path in after.store.sizes(f"{RUN}/checkpoints")}  # fmt: skip
        assert there == {f"step-{steps + 1:08d}"}, "what was half sent, or half removed, is gone"
        assert after.last_checkpoint() == steps + 1


def test_unchanged_files_are_not_sent_again(tmp_path: Path) -> None:
    mirror = mirror_at(tmp_path, "unchanged")
    with CheckpointStore(tmp_path / RUN / "checkpoints", keep=2) as checkpoints:
        train(tmp_path / RUN, checkpoints, 1)
    mirror.send()
    mirror.store.left = 0  # type: ignore[attr-defined]
    mirror.send()
    again = mirror_at(tmp_path / "again", "unchanged")
    again.fetch_run()
    again.store.left = 0  # type: ignore[attr-defined]
    again.send()


def test_each_role_fetches_the_files_it_reads_and_sends_those_it_wrote(tmp_path: Path) -> None:
    trainer = mirror_at(tmp_path / "trainer", "shared")
    (tmp_path / "trainer" / RUN / "processes").mkdir()
    for name in ("processes/job.json", "steps.jsonl", ".lock"):
        (tmp_path / "trainer" / RUN / name).write_text("{}")
    trainer.send()
    rebalancer = mirror_at(tmp_path / "rebalancer", "shared", "rebalancer")
    rebalancer.fetch_run()
    here = tmp_path / "rebalancer" / RUN
    assert sorted(path.name for path in here.rglob("*.*")) == ["job.json"]
    (here / "traces").mkdir()
    for name in ("moves.jsonl", "traces/rebalancer-0.jsonl"):
        (here / name).write_text("{}\n")
    rebalancer.send()
    trainer.send()  # and removes nothing of others
    (tmp_path / "trainer" / RUN / "steps.jsonl").unlink()
    trainer.send()
    names = {path.removeprefix(f"{RUN}/") for path in trainer.store.sizes(RUN)}
    assert names == {"processes/job.json", "moves.jsonl", "traces/rebalancer-0.jsonl"}
    mirror_at(tmp_path / "again", "shared", "rebalancer").fetch_run()
    assert (tmp_path / "again" / RUN / "moves.jsonl").read_text() == "{}\n"


def test_a_following_rank_does_not_overwrite_files_of_the_first_rank(tmp_path: Path) -> None:
    first = mirror_at(tmp_path, "ranks")
    (tmp_path / RUN / "processes").mkdir()
    for name in ("processes/job.json", "steps.jsonl"):
        (tmp_path / RUN / name).write_text("as it was sent")
    first.send()
    (tmp_path / RUN / "steps.jsonl").write_text("another line")
    Mirror(first.store, tmp_path / RUN, "trainer", 0, follows=True).fetch_run()
    assert (tmp_path / RUN / "steps.jsonl").read_text() == "another line"


def test_control_fetches_the_traces_of_all_workers(tmp_path: Path) -> None:
    for worker in (0, 1):
        generator = mirror_at(tmp_path / f"{worker}", "traced", "generator", worker)
        (tmp_path / f"{worker}" / RUN / "traces").mkdir()
        (tmp_path / f"{worker}" / RUN / "traces" / f"generator-{worker}.jsonl").write_text("{}\n")
        generator.send()
    control = mirror_at(tmp_path / "control", "traced", "control")
    assert control.fetch_run() == 0
    control.fetch_traces()
    assert len(list((tmp_path / "control" / RUN / "traces").iterdir())) == 2


def test_roles_without_a_model_fetch_no_weights(tmp_path: Path) -> None:
    base = tmp_path / "all"
    (base / "policy").mkdir(parents=True)
    for name in (
        "policy/config.json",
        "policy/model.safetensors",
        "data.jsonl",
        "rewards.py",
        "helpers.py",
        "other.txt",
    ):
        (base / name).write_text("x")
    ObjectStore("s3://bucket/inputs", base).push(path for path in base.rglob("*") if path.is_file())
    job = {"spec": {"model": {"path": "policy"}, "dataset": {"path": "./data.jsonl"}}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    for stage, weights in (("prompts", False), ("prepare", False), ("generator", True)):
        mirror_at(tmp_path / stage, "inputs", stage).fetch_inputs(tmp_path / "job.json")
        names = {path.relative_to(tmp_path / stage).as_posix() for path in (tmp_path / stage).rglob("*.*")}
        wanted = {"policy/config.json", "data.jsonl", "rewards.py", "helpers.py"}
        assert names == wanted | ({"policy/model.safetensors"} if weights else set())
