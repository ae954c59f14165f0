"""What a tenant can write must not stop the operator, nor hold up another's job: on a real API server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import ControlPlane
from kubernetes import client
from operators import RELEASE_NAMESPACE, Operator, World, acting, grant, until
from shared_servers import SharedServers

from rlhfspec.cluster import names

pytestmark = pytest.mark.ci
SAYS_SECONDS = 10.0  # so soon a job says what is wrong with it
UNWATCHED = 'rlhfspec_operator_namespace_unwatched{{job_namespace="{}"}}'


@pytest.fixture(scope="module")
def world(kubernetes: ControlPlane) -> World:
    world = World(kubernetes)
    for name in (RELEASE_NAMESPACE, "calm", "hostile", "lost"):
        world.namespace(name)
    return world


@pytest.fixture
def operator(kubernetes: ControlPlane, world: World, servers: SharedServers, tmp_path: Path) -> Iterator[Operator]:
    kubeconfig = grant(kubernetes, ("calm", "hostile", "lost"))
    with acting(Operator(tmp_path / "a", kubeconfig, servers, namespaces=("calm", "hostile", "lost"))) as operator:
        yield operator


def template(**spec: Any) -> dict[str, Any]:
    return {"podTemplate": {"spec": spec}}


def container(**fields: Any) -> dict[str, Any]:
    return template(containers=[{"name": "worker", **fields}])


def gpus(said: str) -> dict[str, Any]:
    return {"resources": {"limits": {"nvidia.com/gpu": said}}}


# What the API server takes for `roles.prepare`, and no pod can be made of.
TAKEN = {
    "env": container(env=[{"name": ["x"]}]),
    "env-map": container(env={"a": 1}),
    "ports": container(ports="all"),
    "image": container(image=["x"]),
    "grace": template(terminationGracePeriodSeconds="soon"),
    "user": template(securityContext={"runAsUser": "me"}),
    "tolerations": template(tolerations={"key": "x"}),
    "selector": template(nodeSelector=[1]),
    "affinity": template(affinity="near"),
    "fraction": gpus("0.5"),
    "labels": {"podTemplate": {"metadata": {"labels": {"not a label!": "x"}}}},
}


def test_impossible_pod_settings_give_the_job_a_message(world: World, operator: Operator) -> None:
    for name, options in TAKEN.items():
        world.apply("hostile", name, {"roles": {"prepare": options}})
    end = time.monotonic() + SAYS_SECONDS
    silent = set(TAKEN)
    while silent and time.monotonic() < end:
        silent = {name for name in silent if not world.status("hostile", name).get("message")}
        time.sleep(0.1)
    assert not silent, f"these say nothing: {silent}"
    assert all("spec.roles.prepare" in world.status("hostile", name)["message"] for name in TAKEN)
    assert {name: world.status("hostile", name)["reason"] for name in TAKEN} == dict.fromkeys(TAKEN, "BadConfig")


def test_gpus_in_any_notation_are_requested(world: World, operator: Operator) -> None:
    for name, said in {"kilo": "1k", "whole": "1.0", "power": "1e0", "astronomic": "1e99"}.items():
        world.apply("hostile", name, {"roles": {"prepare": gpus(said)}})
        until(lambda name=name: f"{name}-prepare-0" in world.pods("hostile"), f"{said} GPUs are asked for")


@pytest.mark.parametrize(
    "spec",
    [
        {"roles": {"generator": {"workers": 2_000_000_000}}},
        {"roles": {"generator": {"workers": 20_000}}},
        {"roles": {"trainer": {"ranksPerNode": 1_000_000}}},
        {"roles": {"generator": {"replicas": {"min": 1, "max": 20_000}}}},
        {"activeDeadlineSeconds": 10**12},
        {"preRunningDeadlineSeconds": 10**12},
        {"failurePolicy": {"backoffSeconds": 1e300}},
        {"failurePolicy": {"maxRestarts": 2**40}},
        {"training": {"steps": 2**60}},
    ],
)
def test_absurd_numbers_are_refused(world: World, spec: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=r"(?i)invalid|less than or equal"):
        world.apply("hostile", "absurd", spec)


def test_neither_scaling_nor_many_pods_move_operator_or_lease(world: World, operator: Operator) -> None:
    scale = client.CustomObjectsApi(world.kubernetes.client()).patch_namespaced_custom_object_scale
    place = (names.GROUP, names.VERSION, "hostile", names.PLURAL, "scaled")
    world.apply("hostile", "scaled")
    until(lambda: "scaled-prepare-0" in world.pods("hostile"), "it begins")
    with pytest.raises(client.ApiException, match="should be less than or equal to 10000"):
        scale(*place, {"spec": {"replicas": 2_000_000_000}})
    before = operator.rss_bytes
    scale(*place, {"spec": {"replicas": 9_000}})
    assert "jobs.maxWorkers" in world.wait_for_reason("hostile", "scaled", "BadConfig")["message"]
    scale(*place, {"spec": {"replicas": 900}})
    world.ends("hostile", "scaled-prepare-0")
    began = time.monotonic()
    world.apply("calm", "sums")
    until(lambda: "sums-prepare-0" in world.pods("calm"), "another's job begins meanwhile", seconds=5)
    assert time.monotonic() - began < 5.0
    until(lambda: len(world.pods("hostile")) > 900, "all are made", seconds=120)
    assert operator.acts
    assert operator.log.count("acts: holds") == 1
    assert operator.rss_bytes - before < 100 * 1024**2
    world.jobs.delete_namespaced_custom_object(*place)


def test_a_deleted_namespace_does_not_stop_the_operator(
    kubernetes: ControlPlane, world: World, operator: Operator
) -> None:
    world.core.delete_namespace("lost")
    until(lambda: "lost" not in {each.metadata.name for each in world.core.list_namespace().items}, "it is gone")
    operator.stop()
    operator.start()
    until(lambda: operator.acts, "it acts")
    world.apply("calm", "after")
    until(lambda: "after-prepare-0" in world.pods("calm"), "the other namespace is served", seconds=SAYS_SECONDS)
    until(lambda: operator.metrics().get(UNWATCHED.format("lost")) == 1.0, "it is told")
    assert operator.metrics()[UNWATCHED.format("calm")] == 0.0
    time.sleep(5.0)
    assert operator.log.count("RLHFJobs of lost are not watched") == 1
    world.namespace("lost")
    grant(kubernetes, ("lost",))
    world.apply("lost", "sums")
    until(lambda: "sums-prepare-0" in world.pods("lost"), "it is watched again")
    until(lambda: operator.metrics().get(UNWATCHED.format("lost")) == 0.0, "and told")
