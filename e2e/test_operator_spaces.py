"""Scope `cluster`: a label makes a namespace one of jobs, with the chart's own roles and objects; a real API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import ControlPlane
from installed import CHART, IMAGES_OF_NOBODY, kubeconfig_of_account
from kubernetes import client
from operators import RELEASE, RELEASE_NAMESPACE, Operator, World, acting, until
from shared_servers import SharedServers

from rlhfspec.cluster import names

pytestmark = pytest.mark.ci
LABEL = {"team.example/trains": "yes"}
UNWATCHED = 'rlhfspec_operator_namespace_unwatched{{job_namespace="{}"}}'


@pytest.fixture(scope="module")
def world(kubernetes: ControlPlane) -> World:
    world = World(kubernetes)
    world.namespace(RELEASE_NAMESPACE)
    return world


@pytest.fixture(scope="module")
def rendered(kubernetes: ControlPlane, world: World) -> list[dict[str, Any]]:
    """All that makes rights is applied; what the operator is told is in its ConfigMap."""
    values = ("--set", "operator.scope=cluster", "--set", "operator.namespaceLabel=team.example/trains=yes")
    names_ = ("--set", f"fullnameOverride={RELEASE}", "--namespace", RELEASE_NAMESPACE)
    text = kubernetes.helm("template", RELEASE, str(CHART), *IMAGES_OF_NOBODY, *values, *names_)
    objects = [each for each in yaml.safe_load_all(text) if each]
    rights = ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding", "ServiceAccount")
    for each in objects:
        if each["kind"] in rights and not each["metadata"].get("annotations", {}).get("helm.sh/hook"):
            kubernetes.kubectl("apply", "-n", RELEASE_NAMESPACE, "-f", "-", stdin=json.dumps(each))
    return objects


@pytest.fixture
def operator(
    kubernetes: ControlPlane, rendered: list[dict[str, Any]], servers: SharedServers, tmp_path: Path
) -> Iterator[Operator]:
    """As the chart's service account, with the chart's label and kit."""
    account = f"{RELEASE}-operator"
    [config] = [each for each in rendered if (each["kind"], each["metadata"]["name"]) == ("ConfigMap", account)]
    told = json.loads(config["data"]["settings.json"])
    more = {name: told[name] for name in ("namespace_label", "namespace_kit")}
    kubeconfig = kubeconfig_of_account(kubernetes, RELEASE_NAMESPACE, account)
    with acting(Operator(tmp_path / "a", kubeconfig, servers, namespaces=(), scope="cluster", **more)) as operator:
        yield operator


def make(world: World, name: str, labels: dict[str, str]) -> str:
    world.core.create_namespace({"metadata": {"name": name, "labels": labels}})
    return name


def label(world: World, name: str, value: str | None) -> None:
    world.core.patch_namespace(name, {"metadata": {"labels": dict.fromkeys(LABEL, value)}})


def kinds_in(kubernetes: ControlPlane, namespace: str) -> set[str]:
    made = kubernetes.kubectl("get", "sa,pvc,networkpolicy,rolebinding", "-n", namespace, "-o", "name")
    return {line for line in made.split() if "/default" not in line}


def test_a_labelled_namespace_runs_jobs_and_one_that_is_not_runs_none(
    kubernetes: ControlPlane, world: World, operator: Operator
) -> None:
    make(world, "labelled", LABEL)
    make(world, "plain", {"team.example/trains": "no"})
    for namespace in ("labelled", "plain"):
        world.apply(namespace, "sums")
    until(lambda: "sums-prepare-0" in world.pods("labelled"), "its job has a pod")
    made = kinds_in(kubernetes, "labelled")
    assert {f"serviceaccount/{names.SERVICE_ACCOUNT}", f"persistentvolumeclaim/{RELEASE}-storage"} <= made
    assert {f"networkpolicy.networking.k8s.io/{RELEASE}-{role}" for role in ("deny-jobs", *names.ROLES)} <= made
    assert kinds_in(kubernetes, "plain") == set()
    assert world.pods("plain") == {}
    assert world.status("plain", "sums") == {}

    label(world, "plain", "yes")
    until(lambda: "sums-prepare-0" in world.pods("plain"), "a label is enough")
    label(world, "labelled", None)
    until(lambda: UNWATCHED.format("labelled") not in operator.metrics(), "it is watched no more")
    world.apply("labelled", "late")
    world.apply("plain", "next")
    until(lambda: "next-prepare-0" in world.pods("plain"), "the others go on")
    assert world.status("labelled", "late") == {}
    assert "sums-prepare-0" in world.pods("labelled"), "what ran is left alone"

    label(world, "labelled", "yes")
    until(lambda: "late-prepare-0" in world.pods("labelled"), "and with the label all goes on")
    world.ends("labelled", "sums-prepare-0")
    until(lambda: "sums-trainer-0" in world.pods("labelled"), "that of before, too")


def test_a_deleted_namespace_does_not_affect_others(world: World, operator: Operator) -> None:
    make(world, "going", LABEL)
    until(lambda: operator.metrics().get(UNWATCHED.format("going")) == 0.0, "it is watched")
    world.core.delete_namespace("going")
    until(lambda: UNWATCHED.format("going") not in operator.metrics(), "it is watched no more")
    make(world, "after", LABEL)
    world.apply("after", "sums")
    until(lambda: "sums-prepare-0" in world.pods("after"), "others come")
    operator.stop()
    operator.start()
    until(lambda: operator.acts, "it acts again")
    world.ends("after", "sums-prepare-0")
    until(lambda: "sums-trainer-0" in world.pods("after"), "jobs go on")


@pytest.mark.parametrize(
    ("verb", "what", "namespace", "may"),
    [
        ("create", "pods", "bare", False),
        ("patch", "secrets", "bare", False),
        ("list", "rlhfjobs.rlhfspec.io", "bare", False),
        ("create", "networkpolicies.networking.k8s.io", "bare", True),
        ("patch", "serviceaccounts/default", "bare", False),
        ("patch", f"serviceaccounts/{names.SERVICE_ACCOUNT}", "bare", True),
        ("bind", "clusterroles.rbac.authorization.k8s.io/cluster-admin", "", False),
        ("patch", "namespaces/bare", "", False),
    ],
)
def test_the_operator_has_few_rights_outside_labelled_namespaces(
    kubernetes: ControlPlane, rendered: list[dict[str, Any]], verb: str, what: str, namespace: str, may: bool
) -> None:
    assert rendered
    resource, _, name = what.partition("/")
    plural, _, group = resource.partition(".")
    attributes = {"verb": verb, "group": group, "resource": plural, "name": name, "namespace": namespace}
    user = f"system:serviceaccount:{RELEASE_NAMESPACE}:{RELEASE}-operator"
    review = {"spec": {"user": user, "resourceAttributes": attributes}}
    answer = client.AuthorizationV1Api(kubernetes.client()).create_subject_access_review(review)
    assert answer.status.allowed is may


def test_the_operator_cannot_bind_itself_to_another_role(
    kubernetes: ControlPlane, world: World, operator: Operator
) -> None:
    """Rights to make bindings are none to be more than what it is bound to."""
    make(world, "coveted", {})
    body = {
        "metadata": {"name": "more"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [],
    }
    account = kubeconfig_of_account(kubernetes, RELEASE_NAMESPACE, f"{RELEASE}-operator")
    body |= {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding"}
    asked = (f"--kubeconfig={account}", "create", "-n", "coveted", "-f", "-")
    assert "attempting to grant RBAC permissions" in kubernetes.kubectl(*asked, stdin=json.dumps(body), check=False)
