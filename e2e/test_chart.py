"""The chart on a real API server, without nodes: what it makes is admitted, and what it leaves and takes up again."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import ControlPlane, ToolFailed
from installed import CHART, IMAGES_OF_NOBODY, ROOT, kubeconfig_of_account

from rlhfspec.cluster import names

pytestmark = [pytest.mark.ci, pytest.mark.timeout(600)]
SECRETS = [f"rlhfspec-{name}" for name in ("keys", "nats", "redis", "operator-tls", "dashboard")]


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[ControlPlane]:
    with ControlPlane() as kubernetes:
        yield kubernetes


class Hook:
    """Does what the install hook's pod would where there is no node to run it: the same module, as the same service
    account, and then the pod is said to have ended."""

    def __init__(self, kubernetes: ControlPlane, namespace: str, release: str = "rlhfspec") -> None:
        self._kubernetes, self._namespace, self._release = kubernetes, namespace, release
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.error: BaseException | None = None

    def __enter__(self) -> Hook:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                selector = f"app.kubernetes.io/component=install,app.kubernetes.io/instance={self._release}"
                pods = self._kubernetes.get("pods", "-n", self._namespace, "-l", selector)["items"]
                for pod in pods:
                    if pod["status"]["phase"] == "Pending":
                        self._install(pod)
                self._over.wait(0.2)
        except (subprocess.SubprocessError, ToolFailed) as error:
            self.error = error

    def _install(self, pod: dict[str, Any]) -> None:
        [container] = pod["spec"]["containers"]
        command = [sys.executable, *container["command"][1:], *container["args"]]
        config = kubeconfig_of_account(self._kubernetes, self._namespace, pod["spec"]["serviceAccountName"])
        environment = os.environ | {"KUBECONFIG": str(config)}
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60, env=environment)
        ended = {"name": "install", "image": "x", "imageID": "x", "ready": False, "restartCount": 0}
        ended |= {"state": {"terminated": {"exitCode": 0}}}
        status = json.dumps({"status": {"phase": "Succeeded", "containerStatuses": [ended]}})
        where = ("-n", self._namespace, "--subresource=status", "--type=merge")
        self._kubernetes.kubectl("patch", "pod", pod["metadata"]["name"], *where, "-p", status)


def make_namespace(kubernetes: ControlPlane, name: str) -> str:
    levels = {f"pod-security.kubernetes.io/{level}": "restricted" for level in ("enforce", "warn")}
    kubernetes.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": levels}})
    kubernetes.kubectl("wait", "--for=create", "serviceaccount/default", "-n", name, "--timeout=30s")
    return name


def helm(kubernetes: ControlPlane, what: str, namespace: str, *more: str, chart: Path | None = CHART) -> str:
    with Hook(kubernetes, namespace):
        jobs = ("--set", f"operator.jobNamespaces={{{namespace}}}")
        place = [str(chart), *IMAGES_OF_NOBODY, *jobs] if chart else []
        return kubernetes.helm(what, "rlhfspec", *place, "--namespace", namespace, "--timeout", "90s", *more)


def uninstall(kubernetes: ControlPlane, namespace: str) -> str:
    return kubernetes.helm("uninstall", "rlhfspec", "--namespace", namespace)


def uids(kubernetes: ControlPlane, namespace: str, *names: str) -> dict[str, str]:
    found = [kubernetes.get(name, "-n", namespace)["metadata"] for name in names]
    return {each["name"]: each["uid"] for each in found}


def test_a_release_comes_and_goes_and_its_jobs_stay(kubernetes: ControlPlane) -> None:
    space = make_namespace(kubernetes, "comes-and-goes")
    helm(kubernetes, "install", space)
    stay = ("crd/rlhfjobs.rlhfspec.io", "rlhfjob/sums-grpo", "pvc/rlhfspec-storage", f"sa/{names.SERVICE_ACCOUNT}")
    stay += tuple(f"secret/{name}" for name in SECRETS)
    kubernetes.kubectl("apply", "-n", space, "-f", str(ROOT / "examples" / "grpo.yaml"))
    before = uids(kubernetes, space, *stay)

    helm(kubernetes, "upgrade", space, "--set", "operator.replicas=3")
    assert kubernetes.get("deployment/rlhfspec-operator", "-n", space)["spec"]["replicas"] == 3
    helm(kubernetes, "rollback", space, "1", chart=None)
    assert kubernetes.get("deployment/rlhfspec-operator", "-n", space)["spec"]["replicas"] == 2
    assert uids(kubernetes, space, *stay) == before, "keys are made once"
    assert kubernetes.get("jobs", "-n", space)["items"] == [], "the hook is gone with what it was allowed"
    assert "rlhfspec-install" not in kubernetes.kubectl("get", "role,rolebinding,sa", "-n", space, "-o", "name")

    uninstall(kubernetes, space)
    assert uids(kubernetes, space, *stay) == before
    left = kubernetes.kubectl("get", "deployment,statefulset,service,networkpolicy,role", "-n", space, "-o", "name")
    assert left.strip() == ""

    with pytest.raises(ToolFailed, match="exists and cannot be imported"):
        kubernetes.helm("install", "another", str(CHART), *IMAGES_OF_NOBODY, "--namespace", space, "--no-hooks")
    helm(kubernetes, "install", space)
    assert uids(kubernetes, space, *stay) == before
    uninstall(kubernetes, space)


def test_an_upgrade_brings_the_new_custom_resource(kubernetes: ControlPlane, tmp_path: Path) -> None:
    space = make_namespace(kubernetes, "comes-and-goes")  # the CustomResourceDefinition is that of its release
    newer = tmp_path / "rlhfspec"
    shutil.copytree(CHART, newer)
    crd = yaml.safe_load((newer / "files" / "crd.yaml").read_text())
    column = {"name": "New", "type": "string", "jsonPath": ".status.message"}
    crd["spec"]["versions"][0].setdefault("additionalPrinterColumns", []).append(column)
    (newer / "files" / "crd.yaml").write_text(yaml.safe_dump(crd))
    helm(kubernetes, "install", space)
    helm(kubernetes, "upgrade", space, chart=newer)
    [version] = kubernetes.get("crd/rlhfjobs.rlhfspec.io")["spec"]["versions"]
    assert column in version["additionalPrinterColumns"]
    helm(kubernetes, "upgrade", space)
    [version] = kubernetes.get("crd/rlhfjobs.rlhfspec.io")["spec"]["versions"]
    assert column not in version["additionalPrinterColumns"]
    uninstall(kubernetes, space)


POD: dict[str, Any] = {
    "nodeSelector": {"pool": "system"}, "tolerations": [{"key": "system", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
    "priorityClassName": "system-cluster-critical", "podLabels": {"team": "a"}, "podAnnotations": {"note": "a"},
    "podSecurityContext": {"supplementalGroups": [7]}, "securityContext": {"runAsUser": 7},
    "env": [{"name": "HTTPS_PROXY", "value": "http://p"}],
}  # fmt: skip
COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "namespaces": {"operator": {"jobNamespaces": ["matrix", "matrix-jobs"], "replicas": 1}},
    "cluster": {"operator": {"scope": "cluster", "gang": ["kueue", "volcano"]}},
    "external": {
        "nats": {"enabled": False, "external": {"url": "tls://n:4222", "existingSecret": "my-nats"}},
        "redis": {"enabled": False, "external": {"url": "rediss://r:6379", "existingSecret": "my-redis"}},
    },
    "nothing that can be left out": {
        "dashboard": {"enabled": False}, "networkPolicy": {"enabled": False}, "topologySpread": {"enabled": False},
        "podDisruptionBudgets": {"enabled": False}, "storage": {"create": {"enabled": False}},
        "nats": {"persistence": {"enabled": False}},
    },
    "everything": {
        "grafanaDashboards": {"enabled": True}, "priorityClasses": {"enabled": True},
        "images": {"pullSecrets": ["registry"]},
        "dashboard": {"storage": "always", "ingressFrom": [{"podSelector": {}}]},
        "nats": {"persistence": {"storageClass": "fast"}}, "storage": {"create": {"storageClass": "shared"}},
        "networkPolicy": {
            "prometheus": [], "egress": {"reward": [{"cidr": "203.0.113.0/24", "ports": [8000, 8001]}],
                                         "all": [{"cidr": "2001:db8::/32", "ports": [4317]}]},
        },
    },
    "pods, accounts, an ingress": {
        **dict.fromkeys(("operator", "nats", "redis"), POD), "fullnameOverride": "mine", "openshift": "always",
        "dashboard": POD | {
            "ingress": {"enabled": True, "host": "rl.example", "className": "nginx", "tlsSecret": "certificate"},
            "ingressFrom": [{"namespaceSelector": {}}], "serviceAccount": {"annotations": {"cloud.example/role": "a"}},
        },
        "jobs": {"priorityClasses": {"trainer": "high"}, "podTemplate": {"spec": {"nodeSelector": {"gpu": "a"}}}},
    },
    "eight GPUs a node": yaml.safe_load((CHART / "examples" / "eight-gpu-nodes.yaml").read_text()),
    "a claim that is there": {"storage": {"claim": "mine"}},
}  # fmt: skip


@pytest.fixture(scope="module")
def matrix(kubernetes: ControlPlane) -> ControlPlane:
    for name in ("matrix", "matrix-jobs"):
        make_namespace(kubernetes, name)
    return kubernetes


@pytest.mark.parametrize("name", COMBINATIONS)
def test_what_values_render_is_accepted_and_keeps_to_restricted_pods(
    matrix: ControlPlane, tmp_path: Path, name: str
) -> None:
    values = tmp_path / "values.yaml"
    values.write_text(yaml.safe_dump(COMBINATIONS[name]))
    matrix.helm("lint", "--strict", str(CHART), "--values", str(values))
    text = matrix.helm(
        "template", "other", str(CHART), *IMAGES_OF_NOBODY, "--namespace", "matrix", "--values", str(values)
    )
    lines = said_of(matrix, text, tmp_path)
    assert not [line for line in lines if not line.endswith("(server dry run)")], "an error, or a warning"
    assert len(lines) == text.count("\nkind: ")


def test_a_pod_that_breaks_the_standard_would_be_noticed(matrix: ControlPlane, tmp_path: Path) -> None:
    text = matrix.helm("template", "other", str(CHART), *IMAGES_OF_NOBODY, "--namespace", "matrix")
    said = "\n".join(said_of(matrix, re.sub(r"drop:\s+- ALL", "drop: [NET_RAW]", text), tmp_path))
    assert "Warning: would violate PodSecurity" in said
    assert "forbidden: violates PodSecurity" in said, "the pod of helm test"


def said_of(kubernetes: ControlPlane, text: str, folder: Path) -> list[str]:
    """What the API server says of objects, those that name no namespace in `matrix`."""
    (folder / "all.yaml").write_text(text)
    config = yaml.safe_load(kubernetes.kubeconfig.read_text())
    for context in config["contexts"]:
        context["context"]["namespace"] = "matrix"
    (folder / "kubeconfig").write_text(yaml.safe_dump(config))
    how = (f"--kubeconfig={folder / 'kubeconfig'}", "--dry-run=server", "--server-side", "--force-conflicts")
    return kubernetes.kubectl("apply", *how, "-f", str(folder / "all.yaml"), check=False).splitlines()


OPERATOR, DASHBOARD, JOB = "rlhfspec-operator", "rlhfspec-dashboard", names.SERVICE_ACCOUNT
# (who, verb, what, in which namespace, whether it may with scope `namespace`, and with scope `cluster`)
MAY: list[tuple[str, str, str, str, bool, bool]] = [
    (OPERATOR, "patch", "rlhfjobs.rlhfspec.io/status", "may-jobs", True, True),
    (OPERATOR, "watch", "rlhfjobs.rlhfspec.io", "may-jobs", True, True),
    (OPERATOR, "watch", "rlhfjobs.rlhfspec.io", "default", False, False),
    (OPERATOR, "delete", "rlhfjobs.rlhfspec.io", "may-jobs", True, True),
    (OPERATOR, "create", "pods", "may-jobs", True, True),
    (OPERATOR, "create", "pods", "default", False, False),
    (OPERATOR, "list", "namespaces", "", False, True),
    (OPERATOR, "create", "rolebindings.rbac.authorization.k8s.io", "default", False, True),
    (OPERATOR, "patch", "serviceaccounts", "default", False, False),
    (OPERATOR, "patch", "rolebindings.rbac.authorization.k8s.io", "default", False, False),
    (OPERATOR, "create", "pods/exec", "may-jobs", False, False),
    (OPERATOR, "patch", "pods", "may", True, True),
    (OPERATOR, "update", "leases.coordination.k8s.io", "may", True, True),
    (OPERATOR, "update", "leases.coordination.k8s.io", "may-jobs", False, False),
    (OPERATOR, "patch", "secrets", "may-jobs", True, True),
    (OPERATOR, "patch", "secrets", "may", False, False),
    (OPERATOR, "patch", "secrets", "default", False, False),
    (OPERATOR, "get", "secrets", "may-jobs", False, False),
    (OPERATOR, "list", "secrets", "may", False, False),
    (OPERATOR, "create", "tokenreviews.authentication.k8s.io", "", True, True),
    (OPERATOR, "create", "clusterrolebindings.rbac.authorization.k8s.io", "", False, False),
    (OPERATOR, "patch", "customresourcedefinitions.apiextensions.k8s.io", "", False, False),
    (DASHBOARD, "list", "rlhfjobs.rlhfspec.io", "may-jobs", True, True),
    (DASHBOARD, "list", "rlhfjobs.rlhfspec.io", "default", False, True),
    (DASHBOARD, "patch", "rlhfjobs.rlhfspec.io", "may-jobs", False, False),
    (DASHBOARD, "get", "secrets", "may-jobs", False, False),
    (DASHBOARD, "create", "subjectaccessreviews.authorization.k8s.io", "", True, True),
    (JOB, "get", "secrets", "may-jobs", False, False),
    (JOB, "list", "pods", "may-jobs", False, False),
    (JOB, "get", "rlhfjobs.rlhfspec.io", "may-jobs", False, False),
]  # fmt: skip


@pytest.mark.parametrize("scope", ["namespace", "cluster"])
def test_each_may_do_what_it_needs_and_no_more(kubernetes: ControlPlane, tmp_path: Path, scope: str) -> None:
    for space in ("may", "may-jobs"):
        make_namespace(kubernetes, space)
    named = () if scope == "cluster" else ("--set", "operator.jobNamespaces={may-jobs}")
    settings = ("--set", f"operator.scope={scope}", *named, "--no-hooks")
    where = ("--namespace", "may", "--take-ownership")
    kubernetes.helm("upgrade", "--install", "rlhfspec", str(CHART), *IMAGES_OF_NOBODY, *where, *settings)
    if scope == "cluster":  # where a namespace has the label the operator makes this
        told = kubernetes.get("configmap/rlhfspec-operator", "-n", "may")["data"]["settings.json"]
        for each in json.loads(told)["namespace_kit"]:
            kubernetes.kubectl("apply", "-n", "may-jobs", "-f", "-", stdin=json.dumps(each))
    reviews = [review(*asked[:4]) for asked in MAY]
    found = kubernetes.kubectl("create", "-f", "-", "-o", "json", stdin="\n".join(map(json.dumps, reviews)))
    allowed = [each["status"]["allowed"] for each in documents(found)]
    wanted = [asked[5 if scope == "cluster" else 4] for asked in MAY]
    if scope == "cluster":
        kubernetes.helm(
            "upgrade",
            "rlhfspec",
            str(CHART),
            *IMAGES_OF_NOBODY,
            *where,
            "--set",
            "operator.jobNamespaces={may-jobs}",
            "--no-hooks",
        )
        assert kubernetes.get("role/rlhfspec-jobs", "-n", "may-jobs")["rules"], "back to named namespaces"
    wrong = [asked[:4] for asked, is_so, should in zip(MAY, allowed, wanted, strict=True) if is_so != should]
    assert not wrong
    uninstall(kubernetes, "may")


def review(account: str, verb: str, what: str, space: str) -> dict[str, Any]:
    resource, _, subresource = what.partition("/")
    plural, _, group = resource.partition(".")
    attributes = {"verb": verb, "group": group, "resource": plural, "subresource": subresource, "namespace": space}
    home = "may-jobs" if account == JOB else "may"
    user = f"system:serviceaccount:{home}:{account}"
    groups = ["system:serviceaccounts", f"system:serviceaccounts:{home}", "system:authenticated"]
    return {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {"user": user, "groups": groups, "resourceAttributes": attributes},
    }


def documents(text: str) -> list[dict[str, Any]]:
    """JSON objects one after the other, or one List of them."""
    decoder, found, text = json.JSONDecoder(), [], text.strip()
    while text:
        one, end = decoder.raw_decode(text)
        found += one["items"] if one["kind"] == "List" else [one]
        text = text[end:].strip()
    return found


def test_people_who_edit_a_namespace_make_jobs_there(kubernetes: ControlPlane) -> None:
    space = make_namespace(kubernetes, "people")
    helm(kubernetes, "install", space, "--take-ownership")
    for person, role in {"eve": "edit", "vic": "view"}.items():
        kubernetes.kubectl("create", "rolebinding", person, f"--clusterrole={role}", f"--user={person}", "-n", space)

    def may(person: str, verb: str, subresource: str = "") -> bool:
        asked = ("auth", "can-i", verb, "rlhfjobs.rlhfspec.io", f"--subresource={subresource}", "-n", space)
        return kubernetes.kubectl(*asked, f"--as={person}", check=False).strip() == "yes"

    end = time.monotonic() + 30.0
    while not may("eve", "create"):  # the controller takes the roles in
        assert time.monotonic() < end
        time.sleep(0.2)
    assert may("eve", "patch", "scale")
    assert may("vic", "watch")
    assert not may("vic", "create")
    assert not may("eve", "patch", "status")
    uninstall(kubernetes, space)
