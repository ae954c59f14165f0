"""A job whose data, models and run folder are in an object store: no pod sees another's folder, and the curve is the
laptop's."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from installed import IMAGES, NAMESPACE, Installed, Job, copy_made, curve_of, example
from object_stores import ObjectServer

STEPS = 8
URI, SECRET = "s3://bucket/team", "store-keys"
CLUSTER = {"images": IMAGES}


def grpo(name: str = "sums", **storage: Any) -> dict[str, Any]:
    job = example("grpo", training={"steps": STEPS}, evaluation=None, checkpoint={"everySteps": 2})
    job["metadata"] = {"name": name}
    job["spec"]["storage"] = {"uri": URI, "secret": SECRET} | storage
    return job


@pytest.fixture(scope="module")
def server(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    """On this machine, where pods reach it by the address of the nodes' bridge; with the models that it has made."""
    server = ObjectServer(tmp_path_factory.mktemp("s3") / "buckets", host=cluster.address)
    copy_made(server.folder / "bucket" / "team" / "cache")
    with server:
        yield server


@pytest.fixture(scope="module")
def installed_with_a_store(installed: Installed, server: ObjectServer) -> Installed:
    way = {"cidr": f"{installed.cluster.address}/32", "except": [], "ports": [server.port]}
    installed.install(networkPolicy={"egress": {"all": [way]}})
    add_secret(installed.cluster, SECRET, server.variables)
    add_secret(installed.cluster, "wrong-keys", server.variables | {"AWS_SECRET_ACCESS_KEY": "wrong"})
    return installed


def add_secret(cluster: Cluster, name: str, variables: dict[str, str]) -> None:
    data = {key: base64.b64encode(value.encode()).decode() for key, value in variables.items()}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"rlhfspec.io/jobs-may-use": "true"}}
    cluster.apply({"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})


@pytest.mark.ci
def test_a_job_trains_to_the_same_bits_though_its_trainer_is_lost(
    installed_with_a_store: Installed, laptop: Path, tmp_path: Path
) -> None:
    job = installed_with_a_store.submit(grpo())
    job.wait_for_step(3, seconds=300)
    [trainer] = job.pods("trainer")
    job.kubectl("delete", "pod", trainer["metadata"]["name"], "-n", NAMESPACE, "--grace-period=0", "--force")
    job.wait_for_phase("Succeeded", seconds=600)
    for pod in job.pods():
        kinds = {kind for volume in pod["spec"]["volumes"] for kind in volume}
        assert "persistentVolumeClaim" not in kinds
    assert fetched(installed_with_a_store, job, tmp_path) == curve_of(laptop)
    assert job.status["progress"]["checkpointStep"] == STEPS
    job.delete()


def fetched(installed: Installed, job: Job, folder: Path) -> list[dict[str, Any]]:
    """As its user would: from the store, by a pod that is made for it."""
    installed.rlhf("get-run", job.name, str(folder / "run"))
    assert "get-run" not in job.kubectl("get", "pods", "-n", NAMESPACE, "-o", "name")
    return curve_of(folder / "run")


def test_a_suspended_job_leaves_no_pods_and_resumes(
    installed_with_a_store: Installed, laptop: Path, tmp_path: Path
) -> None:
    job = installed_with_a_store.submit(grpo())
    job.wait_for_step(2, seconds=300)
    job.patch(suspend=True)
    job.wait_for_phase("Suspended", seconds=200)
    assert not job.pods()
    job.patch(suspend=False)
    job.wait_for_phase("Succeeded", seconds=600)
    assert job.status["run"]["number"] == 2
    assert fetched(installed_with_a_store, job, tmp_path) == curve_of(laptop)
    job.delete()


def test_a_wrong_object_store_is_named_by_why(installed_with_a_store: Installed, server: ObjectServer) -> None:
    for wrong, said in (
        ({"secret": "wrong-keys"}, "spec.storage.uri: the store refuses"),
        ({"uri": "s3://nobucket/team"}, "spec.storage.uri: the bucket does not exist"),
    ):
        job = installed_with_a_store.submit(grpo("wrong", **wrong))
        job.wait("BadConfig", lambda job=job: job.reason() == "BadConfig", seconds=60)  # type: ignore[misc]
        assert said in installed_with_a_store.rlhf("why", "wrong")
        job.delete()
    job = installed_with_a_store.submit(grpo("secretless", secret="no-such"))
    job.wait("its Secret is missed", lambda: "no-such" in str(job.status.get("conditions")), seconds=60)
    job.delete()
    server.stop()
    try:
        job = installed_with_a_store.submit(grpo("away"))
        job.wait("StorageUnavailable", lambda: job.reason() == "StorageUnavailable", seconds=60)
        assert f"storage away: {URI}" in installed_with_a_store.rlhf("why", "away")
    finally:
        server.start()
    job.wait_for_phase("Running", seconds=300)
    job.delete()
