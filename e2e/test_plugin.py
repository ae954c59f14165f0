"""kubectl-rlhf on a real API server, with jobs and pods made by hand: what it shows, explains and changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from cluster import ControlPlane
from invalid_jobs import edited
from typer.testing import CliRunner, Result

from rlhfspec.cluster import names
from rlhfspec.cluster.crd import custom_resource_definition
from rlhfspec.plugin.changes import drain, to_drain
from rlhfspec.plugin.cluster import Cluster, Where
from rlhfspec.plugin.main import app

pytestmark = pytest.mark.ci
SINCE = "2026-01-01T00:00:00Z"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with ControlPlane(controllers=False) as plane:
        plane.define(custom_resource_definition())
        plane.apply(
            {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "rl", "labels": RESTRICTED}},
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default", "namespace": "rl"}},
        )
        yield plane


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane) -> Iterator[Cluster]:
    with Cluster(Where(namespace="rl", kubeconfig=str(plane.kubeconfig))) as cluster:
        yield cluster


@pytest.fixture
def rlhf(plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> Rlhf:
    monkeypatch.setenv("COLUMNS", "200")
    return Rlhf(plane)


class Rlhf:
    """The command, as a user types it."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def __call__(self, *words: str, code: int = 0) -> str:
        where = ["-n", "rl", "--kubeconfig", str(self._plane.kubeconfig)]
        result: Result = CliRunner().invoke(app, [*words, *where])
        assert result.exit_code == code, result.output + repr(result.exception)
        assert "Traceback" not in result.output
        return result.output


def make_job(plane: ControlPlane, name: str, status: dict[str, Any] | None = None, **edits: Any) -> None:
    job = edited({"/metadata.name": name, "/metadata.namespace": "rl"} | edits)
    plane.apply(job)
    if status:
        plane.kubectl(
            "patch", "-n", "rl", f"rlhfjob/{name}", "--subresource=status", "--type=merge", "-p",
            json.dumps({"status": status}),
        )  # fmt: skip


def make_pod(
    plane: ControlPlane, job: str, role: str, worker: int = 0, *, node: str = "node1", status: dict[str, Any]
) -> str:
    from rlhfspec.plugin.run_folder import helper_pod

    name = names.pod_name(job, role, worker)
    pod = helper_pod(name, "rl", "claim", "localhost/rlhfspec:cpu")
    pod["metadata"]["labels"] = names.labels_of(job, role, worker)
    pod["spec"]["terminationGracePeriodSeconds"] = 30
    if node:
        pod["spec"]["nodeName"] = node
    plane.apply(pod)
    plane.kubectl(
        "patch", "-n", "rl", f"pod/{name}", "--subresource=status", "--type=merge", "-p", json.dumps({"status": status})
    )
    return name


def running(*, ready: bool = True) -> dict[str, Any]:
    state = {"running": {"startedAt": SINCE}}
    return {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": str(ready)}],
        "containerStatuses": [container(state, ready=ready)],
    }


def container(state: dict[str, Any], *, ready: bool = False) -> dict[str, Any]:
    return {"name": "worker", "image": "x", "imageID": "", "ready": ready, "restartCount": 0, "state": state}


def ended(code: int, message: str) -> dict[str, Any]:
    state = {"terminated": {"exitCode": code, "reason": "Error", "message": message}}
    return {"phase": "Failed", "containerStatuses": [container(state)]}


def healthy(status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {"type": "Healthy", "status": status, "reason": reason, "message": message, "lastTransitionTime": SINCE}


def warn(plane: ControlPlane, kind: str, name: str, reason: str, message: str, **about: str) -> None:
    event = {
        "apiVersion": "v1", "kind": "Event", "metadata": {"name": f"{name}.{reason.lower()}", "namespace": "rl"},
        "involvedObject": {"kind": kind, "name": name, "namespace": "rl"} | about, "type": "Warning", "reason": reason,
        "message": message, "lastTimestamp": SINCE, "source": {"component": "test"},
    }  # fmt: skip
    plane.apply(event)


def test_status_shows_the_tree(plane: ControlPlane, rlhf: Rlhf) -> None:
    progress = {"step": 12, "totalSteps": 100, "shown": "12/100", "reward": 0.4567, "kl": 0.01, "etaSeconds": 90}
    status = {
        "phase": "Running", "progress": progress, "run": {"number": 2, "uid": "a", "folder": "/storage/runs/tree"},
        "roles": {"generator": {"wanted": 2, "ready": 1}, "trainer": {"wanted": 1, "ready": 1}},
        "restarts": {"total": 3, "byWorker": {"generator-1": 3}},
        "conditions": [healthy("True", "AsExpected"), healthy("False", "Running") | {"type": "Suspended"}],
    }  # fmt: skip
    make_job(plane, "tree", status)
    make_pod(plane, "tree", "trainer", status=running())
    make_pod(plane, "tree", "generator", 0, status=running())
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    make_pod(plane, "tree", "generator", 1, node="node2", status={"containerStatuses": [container(waiting)]})
    said = rlhf("status", "tree")
    assert "tree  Running" in said
    assert "step 12/100  reward 0.457, KL 0.0100, about 1m30s left" in said
    assert "run 2 in /storage/runs/tree, 3 restarts" in said
    assert "generator  1/2 ready" in said
    lines = said.splitlines()
    first, second = (next(line for line in lines if f"tree-generator-{worker}" in line) for worker in (0, 1))
    assert "Ready  node1" in first
    assert "ImagePullBackOff  node2" in second
    assert "3 restarts" in second
    assert "not found" in second
    assert lines.index(first) < next(i for i, line in enumerate(lines) if "tree-trainer-0" in line)
    assert "Healthy=True" in said
    assert "Suspended=" not in said, "what is not so is no news"
    assert "tree  Running" in rlhf("status"), "without a name: every job"


def test_why_explains_a_pending_job(plane: ControlPlane, rlhf: Rlhf) -> None:
    message = "pending-generator-0: 0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
    status = {"phase": "Starting", "reason": "Unschedulable", "message": message,
              "roles": {"generator": {"wanted": 1, "ready": 0}},
              "conditions": [healthy("False", "Unschedulable", message)]}  # fmt: skip
    make_job(plane, "pending", status)
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes fit"}
    make_pod(plane, "pending", "generator", node="", status={"conditions": [scheduled]})
    warn(plane, "Pod", "pending-generator-0", "FailedScheduling", "Insufficient nvidia.com/gpu")
    said = rlhf("why", "pending").splitlines()
    assert said[0].startswith("pending is Starting: Unschedulable (since ")
    assert said[0].endswith(message)
    assert "not ready yet: generator 0/1" in said
    assert "pod pending-generator-0: Unschedulable: 0/2 nodes fit" in said
    assert any("FailedScheduling: Insufficient nvidia.com/gpu" in line for line in said)


def test_why_explains_a_failed_job(plane: ControlPlane, rlhf: Rlhf) -> None:
    message = "trainer-0: 6 failures since step 3, the last: CUDA out of memory"
    status = {"phase": "Failed", "reason": "CrashLoop", "message": message,
              "conditions": [healthy("False", "CrashLoop", message)]}  # fmt: skip
    make_job(plane, "failed", status)
    make_pod(plane, "failed", "trainer", status=ended(1, "Traceback\nRuntimeError: CUDA out of memory\n"))
    said = rlhf("why", "failed")
    assert said.startswith("failed is Failed: CrashLoop")
    assert "pod failed-trainer-0: Error: exit code 1: RuntimeError: CUDA out of memory" in said


def test_what_a_pod_says_never_acts_upon_the_terminal(plane: ControlPlane, rlhf: Rlhf) -> None:
    hostile = "\x1b[2J\x1b]0;taken\x07 \u202eno such file\r\n"
    status = {"phase": "Failed", "reason": "CrashLoop", "message": hostile,
              "conditions": [healthy("False", "CrashLoop", hostile)]}  # fmt: skip
    make_job(plane, "hostile", status)
    make_pod(plane, "hostile", "trainer", status=ended(1, hostile))
    for command in ("why", "status"):
        said = rlhf(command, "hostile")
        assert "␛[2J␛]0;taken␇ �no such file" in said
        assert not set(said) & set("\x1b\x07\r\u202e")


def test_why_describes_healthy_and_unseen_jobs(plane: ControlPlane, rlhf: Rlhf) -> None:
    make_job(plane, "unseen")
    assert "is one running, and does it watch this namespace?" in rlhf("why", "unseen")
    make_job(plane, "well", {"phase": "Running", "progress": {"shown": "1/2"}, "conditions": [healthy("True", "x")]})
    make_pod(plane, "well", "trainer", status=running(ready=False))  # it starts, and its probe fails until it has
    warn(plane, "Pod", "well-trainer-0", "Unhealthy", "Startup probe failed: connection refused")
    warn(plane, "RLHFJob", "well", "Evicted", "an older job of this name", uid="0")
    assert rlhf("why", "well") == "well is Running, step 1/2; no problem is known\n"
    make_job(plane, "asleep", {"phase": "Suspended", "conditions": [healthy("True", "x")]}, suspend=True)
    assert "`kubectl rlhf resume` continues it" in rlhf("why", "asleep")


def test_suspend_and_resume(plane: ControlPlane, rlhf: Rlhf) -> None:
    make_job(plane, "paused")
    assert "writes a checkpoint and deletes its pods" in rlhf("suspend", "paused")
    assert plane.get("-n", "rl", "rlhf", "paused")["spec"]["suspend"] is True
    assert "suspend is already true" in rlhf("suspend", "paused")
    assert "continues from its checkpoint" in rlhf("resume", "paused")
    assert plane.get("-n", "rl", "rlhf", "paused")["spec"]["suspend"] is False
    make_job(plane, "over", {"phase": "Succeeded"})
    assert "nothing to suspend" in rlhf("suspend", "over")
    assert plane.get("-n", "rl", "rlhf", "over")["spec"]["suspend"] is False


def test_drain_evicts_what_was_named_and_waits(plane: ControlPlane, cluster: Cluster) -> None:
    make_job(plane, "moving")
    for worker, node in ((0, "node1"), (1, "node2"), (2, "node2")):
        make_pod(plane, "moving", "generator", worker, node=node, status=running())

    def kubelets(_: float) -> None:
        """Nobody ends processes here but we."""
        for pod in plane.get("-n", "rl", "pods")["items"]:
            if "deletionTimestamp" in pod["metadata"]:
                name = pod["metadata"]["name"]
                plane.kubectl("delete", "-n", "rl", "pod", name, "--force", "--grace-period=0")

    one = to_drain(cluster, "moving", "generator-0", None)
    assert list(drain(cluster, one, timeout_seconds=30, sleep=kubelets)) == [
        "generator-0: asked to leave node1", "moving-generator-0: has left",
    ]  # fmt: skip
    rest = to_drain(cluster, "moving", None, "node2")
    said = list(drain(cluster, rest, timeout_seconds=30, sleep=kubelets))
    assert [line.split(":")[0] for line in said] == [
        "generator-1", "generator-2", "moving-generator-1", "moving-generator-2",
    ]  # fmt: skip
    assert cluster.pods("moving") == []


def test_drain_respects_a_disruption_budget_and_its_time(plane: ControlPlane, rlhf: Rlhf) -> None:
    make_job(plane, "guarded")
    make_pod(plane, "guarded", "generator", status=running())
    said = rlhf("drain", "guarded", "generator-0", "--timeout-seconds", "1", code=1)
    assert "still there after 1 s: guarded-generator-0" in said
    make_pod(plane, "guarded", "generator", 1, status=running())
    plane.apply(
        {
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "keep", "namespace": "rl"},
            "spec": {"minAvailable": 1, "selector": {"matchLabels": {names.JOB: "guarded"}}},
        }
    )  # fmt: skip
    assert "disruption budget" in rlhf("drain", "guarded", "generator-1", code=1)


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["status", "knwn"], 2, "does not exist in namespace rl; did you mean known?"),
        (["why", "nothing-like-it"], 2, "; existing jobs: "),
        (["drain", "known"], 2, "needs either a worker, such as generator-1, or --node"),
        (["drain", "known", "generator-7"], 2, "no such worker of known is running"),
        (["drain", "known", "--node", "node9"], 2, "its nodes: node1"),
        (["top", "known"], 2, "its control pod is not running: the job is Running"),
        (["view", "known"], 2, "its control pod is not running"),
        (["get-run", "unseen"], 2, "it has not started"),
        (["status", "--context", "no-such"], 2, "kubeconfig: cannot be used"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_wrong_arguments_are_refused_in_one_line(
    rlhf: Rlhf, plane: ControlPlane, words: list[str], code: int, says: str
) -> None:
    make_job(plane, "known", {"phase": "Running"})
    make_pod(plane, "known", "generator", status=running())
    make_job(plane, "unseen")
    said = rlhf(*words, code=code)
    assert says in said
    assert said.count("\n") == 1


def test_an_unreachable_or_forbidden_cluster_is_reported(plane: ControlPlane, rlhf: Rlhf) -> None:
    away = str(plane.folder / "away.kubeconfig")
    with open(plane.kubeconfig) as good, open(away, "w") as bad:
        bad.write(good.read().replace(plane.server, "https://127.0.0.1:1"))
    result = CliRunner().invoke(app, ["status", "--kubeconfig", away])
    assert (result.exit_code, result.output.count("\n")) == (1, 1)
    assert "no answer" in result.output
    nobody = str(plane.kubeconfig_of("nobody"))
    result = CliRunner().invoke(app, ["status", "-n", "rl", "--kubeconfig", nobody])
    assert result.exit_code == 1
    assert 'User "nobody" cannot list resource "rlhfjobs"' in result.output


def test_help_needs_no_cluster() -> None:
    said = CliRunner().invoke(app, ["--help"]).output
    for command in ("status", "logs", "why", "drain", "suspend", "resume", "top", "view", "get-run"):
        assert f" {command} " in said
