"""What the operator makes of jobs, before a real API server: admitted where pod security is *restricted*, made again
without a change; and a status that reads back as it was written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import ControlPlane
from operator_world import SETTINGS, World, job_body

from rlhfspec.cluster import names
from rlhfspec.cluster.access import KubeAccess
from rlhfspec.cluster.api import Api, ApiResponse
from rlhfspec.cluster.crd import custom_resource_definition
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.looking.looks import Reconciler
from rlhfspec.operator.looking.views import job_view, pod_view

pytestmark = pytest.mark.ci
GPU = {"limits": {"nvidia.com/gpu": 1, "cpu": "2"}}
EXTRA = {
    "metadata": {"labels": {"a": "b"}},
    "spec": {
        "containers": [
            {"name": "worker", "env": [{"name": "X", "value": "1"}], "volumeMounts": [{"name": "e", "mountPath": "/e"}]}
        ],
        "volumes": [{"name": "e", "emptyDir": {}}],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
}
JOBS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ppo": {
        "algorithm": {"name": "ppo"},
        "roles": {"generator": {"workers": 2, "resources": GPU}, "trainer": {"ranksPerNode": 2}},
        "scheduling": {"topologyKey": "kubernetes.io/hostname", "priorityClass": "high"},
        "storage": {"claim": "c", "runFolder": "a/b"},
    },
    "volcano": {"scheduling": {"gang": "volcano", "queue": "gpus"}},
    "coscheduling": {"scheduling": {"gang": "coscheduling"}},
    "nodes": {"roles": {"trainer": {"nodes": 2, "ranksPerNode": 2}}},
    "template": {"roles": {"reward": {"podTemplate": EXTRA}}},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[ControlPlane]:
    with ControlPlane(controllers=False) as cluster:  # nobody collects what belongs to a job that is not there
        labels = {"pod-security.kubernetes.io/enforce": "restricted", "pod-security.kubernetes.io/warn": "restricted"}
        cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "rl", "labels": labels}})
        account = {"name": names.SERVICE_ACCOUNT, "namespace": "rl"}
        cluster.apply(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
            {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "high"}, "value": 9},
        )
        cluster.define(custom_resource_definition())
        yield cluster


def things_of(**spec: Any) -> list[dict[str, Any]]:
    """All that is ever created for the job, but the pod groups of schedulers that are not here."""
    world = World(job_body(**spec), labelled={"c"})
    things = made_by(world)
    world.run_all()
    world.end_pod("sums-prepare-0", 0)
    things += made_by(world)
    return [thing for thing in things if thing["kind"] != "PodGroup"]


def made_by(world: World) -> list[dict[str, Any]]:
    things: list[dict[str, Any]] = []
    while not (plan := world.reconcile()).is_quiet:
        things += plan.create
    return things


@pytest.mark.parametrize("name", sorted(JOBS))
def test_pods_are_admitted_as_restricted(cluster: ControlPlane, name: str) -> None:
    things = things_of(**JOBS[name])
    said = cluster.kubectl(
        "apply", "--server-side", "--dry-run=server", "-f", "-", stdin="\n".join(map(json.dumps, things))
    )
    assert said.count("serverside-applied") == len(things)


def test_what_is_there_already_is_taken_up_without_a_change(
    cluster: ControlPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by another replica, that does not know of it yet."""

    def versions() -> dict[str, str]:
        items = cluster.get("pods,configmaps,secrets,services", "-n", "rl", "-l", f"{names.JOB}=sums")["items"]
        return {item["kind"] + item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in items}

    async def make(things: list[dict[str, Any]]) -> list[ApiResponse]:
        async with Api(KubeAccess()) as api:
            looks = Reconciler(Cache(), api, SETTINGS)
            return [await looks._make(thing) for thing in things]

    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    things = things_of(**JOBS["nodes"])
    assert {answer.code for answer in asyncio.run(make(things))} == {200, 201}
    before = versions()
    assert len(before) == len(things) - 1, "the ConfigMap is made with each"
    assert {answer.code for answer in asyncio.run(make(things))} == {200}
    assert versions() == before
    for thing in things:
        thing["metadata"]["ownerReferences"][0]["uid"] = "of-another"
    assert {answer.code for answer in asyncio.run(make(things))} == {409}
    assert versions() == before
    views = [pod_view(pod) for pod in cluster.get("pods", "-n", "rl")["items"]]
    assert {view.role for view in views if view} == {"prepare", "control", "prompts", "generator", "reward", "trainer"}


def test_the_status_reads_back_as_it_was_written(cluster: ControlPlane) -> None:
    world = World()
    world.to_running()
    world.end_pod("sums-reward-0", 1, "boom")
    world.say(step=1, reward=0.25, kl=0.001)
    world.settle()
    cluster.apply({**world.body, "metadata": {"name": "sums", "namespace": "rl"}, "status": {}})
    patch = json.dumps({"status": world.status})
    cluster.kubectl("patch", "rlhf", "sums", "-n", "rl", "--subresource=status", "--type=merge", "-p", patch)
    assert job_view(cluster.get("rlhf", "sums", "-n", "rl")).status == world.plan().status
