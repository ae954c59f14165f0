"""What a cluster does to a job: sidecars that a webhook adds, limits, quotas, nodes without room, API server and etcd,
an upgrade of the release, a NATS that lost its volume. It trains to the laptop's bits, or says why not."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from installed import IMAGES, NAMESPACE, RELEASE, Installed, Job, curve_of, example
from manifests import RESTRICTED
from webhooks import Patches, webhook

from rlhfspec.cluster import names

pytestmark = pytest.mark.own
CLUSTER = {"images": IMAGES}
STEPS = 8
TRAINS_SECONDS = 600.0
SIDECAR = {"name": "mesh", "image": "localhost/pause:1", "imagePullPolicy": "Never", "securityContext": RESTRICTED}

FOREVER = ["sh", "-c", "trap 'exit 7' TERM; while true; do sleep 0.2; done"]


def grpo(**spec: Any) -> dict[str, Any]:
    """Always of one name: what is drawn depends on it."""
    settings = {"training": {"steps": STEPS}, "checkpoint": {"everySteps": 2}, "evaluation": None}
    return example("grpo", **settings, **spec) | {"metadata": {"name": "sums"}}


@pytest.fixture
def submit(installed: Installed) -> Iterator[Callable[..., Job]]:
    """Jobs that are gone after the test."""
    jobs = []

    def submit(**spec: Any) -> Job:
        jobs.append(installed.submit(grpo(**spec)))
        return jobs[-1]

    yield submit
    for job in jobs:
        job.delete()
        job.wait("its pods are gone", lambda job=job: not job.pods(), seconds=200)  # type: ignore[misc]


def trains(job: Job, laptop: Path) -> None:
    job.wait_for_phase("Succeeded", seconds=TRAINS_SECONDS)
    assert job.curve() == curve_of(laptop)
    assert (job.folder / "samples.jsonl").read_bytes() == (laptop / "samples.jsonl").read_bytes()


# --- sidecars -------------------------------------------------------------------------------------------------------


def never_ends(pod: dict[str, Any]) -> Patches:
    """Classic: a container beside ours, which knows nothing of when ours is done."""
    if names.JOB not in pod["metadata"].get("labels", {}):
        return []
    return [{"op": "add", "path": "/spec/containers/-", "value": SIDECAR | {"command": FOREVER}}]


def ends_badly(pod: dict[str, Any]) -> Patches:
    """Native: Kubernetes ends it after ours, and it exits with an error at that."""
    if names.JOB not in pod["metadata"].get("labels", {}):
        return []
    sidecar = SIDECAR | {"command": FOREVER, "restartPolicy": "Always"}
    return [{"op": "add", "path": "/spec/initContainers", "value": [sidecar]}]


@pytest.mark.parametrize("sidecar", [never_ends, ends_badly], ids=["classic", "native"])
def test_a_job_trains_with_a_sidecar_in_every_pod(
    cluster: Cluster, submit: Callable[..., Job], laptop: Path, sidecar: Callable[[dict[str, Any]], Patches]
) -> None:
    name = sidecar.__name__.replace("_", "-")
    with webhook(cluster, name, sidecar, namespace=NAMESPACE):
        job = submit()
        job.wait_for_step(1, seconds=300)
        containers = [
            each for kind in ("containers", "initContainers") for each in job.pods("trainer")[0]["spec"].get(kind, ())
        ]
        assert {each["name"] for each in containers} == {"worker", "mesh"}
        trains(job, laptop)
    assert job.status["restarts"]["total"] == 0
    running = lambda: [p for p in job.pods() if p["status"]["phase"] == "Running"]  # noqa: E731
    job.wait("nothing of it runs", lambda: not running(), seconds=60)


# --- room -----------------------------------------------------------------------------------------------------------


def test_a_job_trains_within_limits_once_the_quota_is_raised(
    cluster: Cluster, submit: Callable[..., Job], laptop: Path
) -> None:
    """Defaults for what says nothing, as much as is allowed; and two pods fewer than the job needs."""
    limit = {"type": "Container", "default": {"memory": "3Gi"}, "max": {"memory": "4Gi"}}
    here = len(cluster.get("pods", "-n", NAMESPACE)["items"])
    limits = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "limits", "namespace": NAMESPACE}}
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few", "namespace": NAMESPACE}}
    cluster.apply(limits | {"spec": {"limits": [limit]}}, quota | {"spec": {"hard": {"pods": str(here + 4)}}})
    try:
        counted = lambda: cluster.get("resourcequota", "few", "-n", NAMESPACE).get("status", {}).get("hard")  # noqa: E731
        cluster.wait_for("the quota is counted", counted)
        job = submit()
        job.wait("it says so", lambda: job.reason() == "QuotaExceeded", seconds=120)
        assert "exceeded quota: few" in job.status["message"]
        cluster.apply(quota | {"spec": {"hard": {"pods": str(here + 20)}}})
        trains(job, laptop)
    finally:
        cluster.kubectl("delete", "limitrange/limits", "resourcequota/few", "-n", NAMESPACE)


def test_a_job_trains_once_it_requests_less_than_a_node_has(submit: Callable[..., Job], laptop: Path) -> None:
    """As the condition tells its user to do."""
    job = submit(roles={"reward": {"resources": {"requests": {"cpu": "1000"}}}})
    job.wait("it says so", lambda: job.reason() == "Unschedulable", seconds=120)
    assert "no node has enough cpu" in job.status["message"]
    job.patch(suspend=True)
    job.wait_for_phase("Suspended", seconds=240)
    job.patch(roles={"reward": {"resources": {"requests": {"cpu": "10m"}}}})
    job.patch(suspend=False)
    trains(job, laptop)


def test_a_job_trains_once_nodes_take_pods_again(cluster: Cluster, submit: Callable[..., Job], laptop: Path) -> None:
    for node in cluster.nodes:
        cluster.kubectl("cordon", node.name)
    job = submit()
    job.wait("it says so", lambda: job.reason() == "Unschedulable", seconds=60)
    for node in cluster.nodes:
        cluster.kubectl("uncordon", node.name)
    trains(job, laptop)


# --- what runs the cluster, and the release -------------------------------------------------------------------------


def test_a_job_survives_restarts_of_api_server_etcd_and_release(
    cluster: Cluster, installed: Installed, submit: Callable[..., Job], laptop: Path
) -> None:
    """The API server is away, comes back, and knows no more what was before; an upgrade, which is taken back."""
    job = submit()
    job.wait_for_step(1, seconds=300)
    before = {pod["metadata"]["uid"] for pod in job.pods()}
    cluster.stop_api_server()
    cluster.start_api_server()
    cluster.compact_etcd()
    job.wait_for_step(2, seconds=300)
    installed.install(operator={"resources": {"limits": {"memory": "500Mi"}}})
    job.wait_for_step(3, seconds=300)
    cluster.helm("rollback", RELEASE, "1", "--namespace", NAMESPACE, "--wait", "--timeout", "240s")
    after = {pod["metadata"]["uid"] for pod in job.pods()}
    assert before <= after or job.phase == "Succeeded", "none of it touched a pod; they go when the job is done"
    trains(job, laptop)
    assert (job.status["run"]["number"], job.status["restarts"]["total"]) == (1, 0)


def test_a_job_survives_a_nats_that_lost_its_volume(cluster: Cluster, submit: Callable[..., Job], laptop: Path) -> None:
    """It says so, and goes on from its checkpoint, by itself or by a new restart.id."""
    job = submit()
    job.wait_for_step(3, seconds=300)
    server = f"statefulset/{RELEASE}-nats"
    cluster.kubectl("scale", server, "-n", NAMESPACE, "--replicas=0")
    cluster.kubectl("wait", f"pod/{RELEASE}-nats-0", "-n", NAMESPACE, "--for=delete", "--timeout=120s")
    for path in (cluster.folder / "volumes" / NAMESPACE / f"data-{RELEASE}-nats-0").iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    cluster.kubectl("scale", server, "-n", NAMESPACE, "--replicas=1")
    cluster.kubectl("rollout", "status", server, "-n", NAMESPACE, "--timeout=120s")
    seconds = job.wait("it says so, or goes on", lambda: job.reason() != "" or job.step > 4, seconds=180)
    print(f"after {seconds:.0f} s: {job.status['reason']}: {job.status['message']}")
    step = job.step
    job.wait("it goes on by itself, or is over", lambda: job.step > step or is_over(job), seconds=180)
    if job.phase == "Failed":
        assert "was not declared, or is gone" in job.installed.rlhf("why", job.name)
        job.patch(restart={"id": "after the flood"})
        job.wait("it goes on", lambda: not is_over(job), seconds=60)
    trains(job, laptop)


def is_over(job: Job) -> bool:
    return job.phase in ("Succeeded", "Failed")
