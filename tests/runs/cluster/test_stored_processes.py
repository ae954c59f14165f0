import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from object_stores import ObjectServer
from pods import OFF, STAGES, Job, Pod
from runs import curve_of, train, with_spec
from shared_servers import SharedServers
from started import HOLD, eventually, hold_rewards

from rlhfspec.cluster import names
from rlhfspec.common.object_store import ObjectStore
from rlhfspec.messages.access.connections import Connections

STEPS = 6
RUN = "runs/letters"
URI = "s3://bucket/team"
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="every pod has a loopback address of its own"),
    pytest.mark.timeout(400),
]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    with ObjectServer(tmp_path / "s3" / "buckets") as server:
        for name, value in server.variables.items():
            monkeypatch.setenv(name, value)
        yield server


class StoredJob(Job):
    def base(self, number: int) -> Path:
        return self.job_file.parent / "storages" / str(number)

    def _connections(self, role: str, content: dict[str, Any], others: dict[str, Any]) -> Connections:
        base = self.base(len(self.pods))
        base.mkdir(parents=True)
        folder = base / RUN
        told = {"base_folder": base, "folder": folder, "job_file": folder / "processes" / "job.json"}
        return super()._connections(role, content, told | {"storage_uri": URI} | others)


@pytest.fixture
def job(job_file: Path, servers: SharedServers, server: ObjectServer) -> Iterator[StoredJob]:
    here = job_file.parent
    hold_rewards(job_file)
    (here / "rewards.py").write_text(HOLD.replace('pathlib.Path(__file__).with_name("hold")', repr_of(here / "hold")))
    with_spec(job_file, generation={"speculation": OFF}, training={"steps": STEPS}, observability={"traces": True})
    ObjectStore(URI, here).push([here / "data.jsonl", here / "rewards.py"])
    with StoredJob(job_file, servers) as job:
        yield job


def repr_of(path: Path) -> str:
    return f"pathlib.Path({str(path)!r})"


@pytest.mark.whole("a run whose every process is a pod's")
def test_a_run_trains_when_its_pods_share_only_an_object_store(job: StoredJob, server: ObjectServer) -> None:
    hold = job.job_file.parent / "hold"
    hold.unlink()
    train(job.job_file, "one")
    prepare = job.start(names.PREPARE)
    assert prepare.ended()[0] == 0, prepare.log
    hold.write_text(f"2 {job.base(len(STAGES)) / RUN}")  # where the trainer has its folder, which is started last
    pods = {stage: job.start(stage) for stage in (*STAGES, names.CONTROL)}
    eventually(lambda: checkpoints(job) >= 2, "two checkpoints in the store")
    pods["trainer"].killed()
    kept = checkpoints(job)
    assert kept < STEPS
    trainer = job.start("trainer")
    eventually(lambda: "loading the policy" in trainer.log, "it has fetched")
    server.stop()
    hold.unlink()
    eventually(lambda: lines_of_trainer(job, trainer) > kept, "a step that cannot be sent")
    time.sleep(1.0)
    server.start()
    assert trainer.ended() == (0, f"completed: step {STEPS}"), trainer.log
    for pod in (pod for role, pod in pods.items() if role != "trainer"):
        assert pod.stopped() == (0, "left: it was asked to"), pod.log
    fetched(job)
    assert curve_of(job.job_file, f"fetched/{RUN}") == curve_of(job.job_file, "one")
    run = job.job_file.parent / "fetched" / RUN
    assert json.loads((run / "manifest.json").read_text())["outcome"] == "completed"
    assert {f"{stage}-0.jsonl" for stage in STAGES} <= {path.name for path in (run / "traces").iterdir()}
    assert "prepared" in prepare.message


def lines_of_trainer(job: StoredJob, trainer: Pod) -> int:
    return (job.base(job.pods.index(trainer)) / RUN / "steps.jsonl").read_text().count("\n")


def checkpoints(job: StoredJob) -> int:
    found = ObjectStore(URI, job.job_file.parent).sizes(f"{RUN}/checkpoints")
    return max((int(path.split("/")[-2][5:]) for path in found if path.endswith("manifest.json")), default=0)


def fetched(job: StoredJob) -> None:
    store = ObjectStore(URI, job.job_file.parent / "fetched")
    store.fetch(store.sizes(RUN))


def test_prepare_reports_a_wrong_object_store_of_the_job(job: StoredJob) -> None:
    none = job.start(names.PREPARE, storage_uri="s3://nobucket/team")
    assert none.ended() == (78, "spec.storage.uri: the bucket does not exist (got 's3://nobucket/team')")
    code, said = job.start(names.PREPARE, storage_uri="s3://bucket/empty").ended()
    assert code == 78
    assert "spec.dataset.path: no such file or folder" in said
