"""A user who may only create, get and delete RLHFJobs gets no Secret, account or node by the operator: on a real API
server, in a namespace with and in one without pod security."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import ControlPlane
from kubernetes import client, config
from operators import RELEASE_NAMESPACE, Operator, World, acting, define, example, grant, until
from shared_servers import SharedServers

from rlhfspec.cluster import names

pytestmark = pytest.mark.ci
EVE, SPACES = "eve", ("secured", "open")
LABEL = {"rlhfspec.io/jobs-may-use": "true"}


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[ControlPlane]:
    with ControlPlane() as plane:
        define(plane)
        yield plane


@pytest.fixture(scope="module")
def world(kubernetes: ControlPlane) -> World:
    world = World(kubernetes)
    world.namespace(RELEASE_NAMESPACE)
    for name in SPACES:
        world.namespace(name)
        for secret, labels in (("another", {}), ("for-jobs", LABEL)):
            metadata = {"name": secret, "labels": labels}
            world.core.create_namespaced_secret(name, {"metadata": metadata, "stringData": {"key": "hunter2"}})
            world.core.create_namespaced_config_map(name, {"metadata": metadata, "data": {"key": "hunter2"}})
        world.core.create_namespaced_service_account(name, {"metadata": {"name": "admin"}})
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    world.core.patch_namespace("secured", {"metadata": {"labels": labels}})
    return world


@pytest.fixture(scope="module", autouse=True)
def operator(
    kubernetes: ControlPlane, world: World, servers: SharedServers, tmp_path_factory: Any
) -> Iterator[Operator]:
    place = tmp_path_factory.mktemp("operator") / "a"
    with acting(Operator(place, grant(kubernetes, SPACES), servers, namespaces=SPACES)) as operator:
        yield operator


@pytest.fixture(scope="module")
def hers(kubernetes: ControlPlane, world: World) -> client.CustomObjectsApi:
    version, api = "rbac.authorization.k8s.io/v1", "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [names.GROUP], "resources": [names.PLURAL], "verbs": ["create", "get", "delete"]}]
    for space in SPACES:
        place = {"name": "jobs-alone", "namespace": space}
        reference = {"kind": "Role", "name": "jobs-alone", "apiGroup": api}
        subjects = [{"kind": "User", "name": EVE, "apiGroup": api}]
        kubernetes.apply(
            {"apiVersion": version, "kind": "Role", "metadata": place, "rules": rules},
            {
                "apiVersion": version,
                "kind": "RoleBinding",
                "metadata": place,
                "roleRef": reference,
                "subjects": subjects,
            },
        )
    return client.CustomObjectsApi(config.new_client_from_config(str(kubernetes.kubeconfig_of(EVE))))


def worker(**fields: Any) -> dict[str, Any]:
    return {"containers": [{"name": "worker", **fields}]}


def volume(**source: Any) -> dict[str, Any]:
    mounts = [{"name": "v", "mountPath": "/v"}]
    return worker(volumeMounts=mounts) | {"volumes": [{"name": "v", **source}]}


def variable(kind: str) -> dict[str, Any]:
    return worker(env=[{"name": "HF_TOKEN", "valueFrom": {f"{kind}KeyRef": {"name": "another", "key": "key"}}}])


HEAD = {"name": "side", "image": "mine", "command": ["cat", "/v/key"]}
# In a pod template, and a word of the refusal.
ATTACKS: dict[str, tuple[dict[str, Any], str]] = {
    "secret": (volume(secret={"secretName": "another"}), "another"),
    "secret-variable": (variable("secret"), "another"),
    "secret-variables": (worker(envFrom=[{"secretRef": {"name": "another"}}]), "another"),
    "secret-projected": (volume(projected={"sources": [{"secret": {"name": "another"}}]}), "another"),
    "secret-pull": ({"imagePullSecrets": [{"name": "another"}]}, "another"),
    "secret-of-init": ({"initContainers": [HEAD | {"envFrom": [{"secretRef": {"name": "another"}}]}]}, "another"),
    "secret-later": (volume(secret={"secretName": "not-there-yet"}), "not-there-yet"),
    "config": (volume(configMap={"name": "another"}), "another"),
    "config-variable": (variable("configMap"), "another"),
    "claim": (volume(persistentVolumeClaim={"claimName": "shared"}), "shared"),
    "account": ({"serviceAccountName": "admin"}, "serviceAccountName"),
    "token": (volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}), "serviceAccountToken"),
    "mounted-token": ({"automountServiceAccountToken": True}, "automountServiceAccountToken"),
    "node": (volume(hostPath={"path": "/etc"}), "hostPath"),
    "network": ({"hostNetwork": True}, "hostNetwork"),
    "processes": ({"hostPID": True}, "hostPID"),
    "port": (worker(ports=[{"containerPort": 80, "hostPort": 80}]), "hostPort"),
    "privileged": (worker(securityContext={"privileged": True}), "privileged"),
    "root": ({"securityContext": {"runAsUser": 0, "runAsNonRoot": False}}, "securityContext"),
    "removed": ({"securityContext": None}, "securityContext"),
}


@pytest.mark.parametrize("space", SPACES)
def test_a_job_gives_its_user_no_secret_account_or_node(
    world: World, hers: client.CustomObjectsApi, space: str
) -> None:
    place = (names.GROUP, names.VERSION, space, names.PLURAL)
    for name, (spec, _) in ATTACKS.items():
        job = example(name)
        job["spec"]["roles"] = {"reward": {"podTemplate": {"spec": spec}}}
        hers.create_namespaced_custom_object(*place, job)
    others = {
        "command": {"roles": {"prepare": {"podTemplate": {"spec": worker(command=["sh"])}}}},
        "image": {"roles": {"control": {"image": "mine"}}},
        "store": {"storage": {"uri": "s3://bucket/a", "secret": "another"}},
        "named-claim": {"storage": {"claim": "anothers"}},
    }
    for name, spec in others.items():
        job = example(name)
        job["spec"] |= spec
        hers.create_namespaced_custom_object(*place, job)
    for name in (*ATTACKS, *others):
        status = until(lambda name=name: world.status(space, name), f"{name} says something", seconds=15)
        status = until(lambda name=name: world.status(space, name).get("reason") and world.status(space, name), name)
        assert (status["phase"], status["reason"]) == ("Failed", "BadConfig"), (name, status)
        assert ATTACKS.get(name, ({}, ""))[1] in status["message"], (name, status["message"])
        assert "hunter2" not in json.dumps(status)
    assert not world.pods(space)
    assert {each.metadata.name for each in world.core.list_namespaced_secret(space).items} == {"another", "for-jobs"}
    for name in (*ATTACKS, *others):
        hers.delete_namespaced_custom_object(*place, name)


@pytest.mark.parametrize("space", SPACES)
def test_a_secret_with_the_label_is_for_jobs(world: World, hers: client.CustomObjectsApi, space: str) -> None:
    job = example("labelled")
    job["spec"]["roles"] = {"reward": {"podTemplate": {"spec": volume(secret={"secretName": "for-jobs"})}}}
    place = (names.GROUP, names.VERSION, space, names.PLURAL)
    hers.create_namespaced_custom_object(*place, job)
    until(lambda: "labelled-prepare-0" in world.pods(space), "it begins")
    hers.delete_namespaced_custom_object(*place, "labelled")
    waiting = example("waiting")
    waiting["spec"]["roles"] = {"reward": {"podTemplate": {"spec": volume(secret={"secretName": "another"})}}}
    hers.create_namespaced_custom_object(*place, waiting)
    world.wait_for_reason(space, "waiting", "BadConfig")
    world.core.patch_namespaced_secret("another", space, {"metadata": {"labels": LABEL}})
    until(lambda: "waiting-prepare-0" in world.pods(space), "it begins once the label is there")
    hers.delete_namespaced_custom_object(*place, "waiting")
    world.core.patch_namespaced_secret("another", space, {"metadata": {"labels": dict.fromkeys(LABEL)}})


def test_the_operator_checks_the_label_of_a_secret_without_reading_it(
    kubernetes: ControlPlane, world: World, tmp_path: Path
) -> None:
    verbs = {
        (entry["verb"], entry["responseStatus"]["code"])
        for entry in kubernetes.audit()
        if entry["user"]["username"] == "operator" and entry.get("objectRef", {}).get("name") in ("another", "for-jobs")
    }
    assert verbs == {("patch", 200), ("patch", 422)}
