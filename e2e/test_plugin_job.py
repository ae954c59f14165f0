"""kubectl-rlhf on a job that trains in pods, and on what it left."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from installed import IMAGES, NAMESPACE, Installed, Job, example

from rlhfspec.errors import ClusterUnavailable
from rlhfspec.plugin.cluster import Cluster, Where

CLUSTER = {"images": IMAGES}
Rlhf = Callable[..., str]


@pytest.fixture(scope="module")
def job(installed: Installed) -> Job:
    """With steps enough for all that is asked of it while it runs."""
    shipped = example("grpo", training={"steps": 200}, checkpoint={"everySteps": 1}, evaluation=None)
    job = installed.submit(shipped | {"metadata": {"name": "asked"}})
    job.wait_for_step(2, seconds=300)
    return job


@pytest.fixture(scope="module")
def rlhf(installed: Installed) -> Rlhf:
    return installed.rlhf


def test_status_and_why_describe_a_running_job(job: Job, rlhf: Rlhf) -> None:
    said = rlhf("status", "asked")
    assert "asked  Running" in said
    assert "/200  reward 0." in said
    for role in ("control", "prompts", "generator", "reward", "reference", "trainer"):
        assert f"{role}  1/1 ready" in said
    assert rlhf("why", "asked").splitlines()[0].endswith("no problem is known")


def test_top_has_the_generators_speed(installed: Installed, job: Job, rlhf: Rlhf) -> None:
    where = Where(namespace=NAMESPACE, kubeconfig=str(installed.cluster.kubeconfig))

    def speed() -> float:
        with suppress(ClusterUnavailable), Cluster(where) as cluster:
            workers = {each["name"]: each for each in cluster.ask_control("asked", "--json")["workers"]}
            return float(workers["generator-0"]["load"]["tokens_per_second"])
        return 0.0

    job.wait("tokens/s of the generator", lambda: speed() > 0.0, seconds=60)
    said = rlhf("top", "asked")
    assert "tokens/s" in said
    assert {f"{role}-0" for role in ("generator", "reward", "trainer", "prompts", "reference")} <= set(said.split())


def test_logs_tell_a_samples_life(job: Job, rlhf: Rlhf) -> None:
    said = rlhf("logs", "asked", "--sample", "asked/1/0/0")
    told = {line.split()[1] for line in said.splitlines()}
    assert {"prompts-0", "generator-0", "reward-0", "reference-0", "trainer-0"} <= told, said
    assert "tokens in" in rlhf("logs", "asked", "--sample", "asked/1/0/0", "--role", "generator")
    assert "the run is open" in rlhf("logs", "asked", "--role", "control")


def test_get_run_copies_the_folder_of_a_suspended_job(job: Job, rlhf: Rlhf, tmp_path: Path) -> None:
    """Of a job without pods: through one that is made for it."""
    rlhf("suspend", "asked")
    job.wait_for_phase("Suspended", seconds=200)
    rlhf("get-run", "asked", str(tmp_path / "run"), "--claim", "jobs", "--image", "localhost/rlhfspec:slim")
    for name in ("steps.jsonl", "samples.jsonl"):
        assert (tmp_path / "run" / name).read_bytes() == (job.folder / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == sorted(
        p.name for p in (job.folder / "checkpoints").iterdir()
    )
    assert "get-run" not in job.kubectl("get", "pods", "-n", NAMESPACE, "-o", "name"), "the pod that read it is gone"


def test_a_resumed_job_uses_the_changed_pod_template(job: Job, rlhf: Rlhf) -> None:
    step = job.status["progress"]["step"]
    template = {"metadata": {"labels": {"team": "other"}}, "spec": {"tolerations": [{"operator": "Exists"}]}}
    change = json.dumps({"spec": {"podTemplate": template}})
    job.kubectl("patch", "rlhf", "asked", "-n", NAMESPACE, "--type=merge", "-p", change)
    rlhf("resume", "asked")
    job.wait_for_step(step + 1, seconds=300)
    assert {pod["metadata"]["labels"].get("team") for pod in job.pods()} == {"other"}
