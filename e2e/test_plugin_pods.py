"""kubectl-rlhf and pods that run: their logs, and the run folder through one of them or through a helper."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster as Kubernetes
from invalid_jobs import edited

from rlhfspec.cluster import names
from rlhfspec.cluster.crd import custom_resource_definition
from rlhfspec.errors import ClusterUnavailable
from rlhfspec.plugin.cluster import Cluster, Where
from rlhfspec.plugin.logs import followed, lines
from rlhfspec.plugin.run_folder import fetch, helper_pod

IMAGE = "localhost/pause:1"


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[Kubernetes]:
    with Kubernetes(nodes=1) as kubernetes:
        kubernetes.define(custom_resource_definition())
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        kubernetes.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "rl", "labels": labels}})
        kubernetes.kubectl("wait", "-n", "rl", "--for=create", "serviceaccount/default", "--timeout=60s")
        yield kubernetes


@pytest.fixture(scope="module")
def storage(kubernetes: Kubernetes) -> Path:
    """This machine's side of the claim `data`."""
    folder = kubernetes.folder / "storage"
    run = folder / "runs" / "sums"
    (run / "checkpoints").mkdir(parents=True)
    (run / "steps.jsonl").write_text('{"step": 1}\n')
    (run / "checkpoints" / "weights").write_bytes(os.urandom(3 << 20))
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    size, access = {"storage": "1Gi"}, ["ReadWriteMany"]
    kubernetes.apply(
        {
            "apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "data"},
            "spec": {"capacity": size, "accessModes": access, "hostPath": {"path": str(folder)},
                     "claimRef": {"namespace": "rl", "name": "data"}, "storageClassName": ""},
        },
        {
            "apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "data", "namespace": "rl"},
            "spec": {"accessModes": access, "resources": {"requests": size}, "volumeName": "data",
                     "storageClassName": ""},
        },
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def job(kubernetes: Kubernetes, storage: Path) -> str:
    """Two pods that speak in turns, each of samples of its own."""
    kubernetes.apply(edited({"/metadata.name": "sums", "/metadata.namespace": "rl"}))
    has_status(kubernetes, {"phase": "Running", "run": {"number": 1, "uid": "a", "folder": "/storage/runs/sums"}})
    speak(kubernetes, "generator", 0, said("generated", "sums/1/2/0"), "sleep 1.5", said("generated", "sums/1/3/0"))
    speak(kubernetes, "reward", 0, "sleep 0.7", said("scored", "sums/1/2/0"), "echo plain words")
    for name in ("sums-generator-0", "sums-reward-0"):
        kubernetes.kubectl("wait", "-n", "rl", "--for=condition=Ready", f"pod/{name}", "--timeout=90s")
    return "sums"


def has_status(kubernetes: Kubernetes, status: dict[str, Any]) -> None:
    kubernetes.kubectl(
        "patch", "-n", "rl", "rlhfjob/sums", "--subresource=status", "--type=merge", "-p",
        json.dumps({"status": status}),
    )  # fmt: skip


def said(message: str, sample: str) -> str:
    return f"echo '{json.dumps({'level': 'info', 'message': message, 'sample': sample})}'"


def speak(kubernetes: Kubernetes, role: str, worker: int, *commands: str) -> None:
    pod = helper_pod(names.pod_name("sums", role, worker), "rl", "data", IMAGE)
    pod["metadata"]["labels"] = names.labels_of("sums", role, worker)
    pod["spec"]["containers"][0]["command"] = ["sh", "-c", "; ".join([*commands, "sleep 3600"])]
    kubernetes.apply(pod)


@pytest.fixture(scope="module")
def cluster(kubernetes: Kubernetes) -> Iterator[Cluster]:
    with Cluster(Where(namespace="rl", kubeconfig=str(kubernetes.kubeconfig))) as cluster:
        yield cluster


def test_logs_of_all_roles_in_the_order_of_time(kubernetes: Kubernetes, cluster: Cluster, job: str) -> None:
    def told(**options: Any) -> list[tuple[str, str]]:
        return [(line.worker, line.message) for line in lines(cluster, job, **options)]

    kubernetes.wait_for("all lines", lambda: len(told()) == 4)
    times = [line.time for line in lines(cluster, job)]
    assert times == sorted(times)
    assert {*told()} == {("generator-0", "generated"), ("reward-0", "scored"), ("reward-0", "plain words")}
    assert told(sample="sums/1/2/0") == [("generator-0", "generated"), ("reward-0", "scored")]
    assert told(role="reward") == [("reward-0", "scored"), ("reward-0", "plain words")]
    assert told(role="reward", tail=1) == [("reward-0", "plain words")]


def test_logs_follow_pods_that_come_later(kubernetes: Kubernetes, cluster: Cluster, job: str) -> None:
    following = followed(cluster, job)
    assert len(list(islice(following, 4))) == 4
    speak(kubernetes, "generator", 1, said("here too", "sums/1/4/0"))
    line = next(following)
    assert (line.worker, line.message) == ("generator-1", "here too")
    following.close()


def test_logs_of_a_job_that_is_over_end(kubernetes: Kubernetes, cluster: Cluster, job: str) -> None:
    speak(kubernetes, "critic", 0, said("the last", "sums/1/5/0"))
    following = followed(cluster, job, role="critic")
    assert next(following).message == "the last"
    has_status(kubernetes, {"phase": "Succeeded"})
    kubernetes.kubectl("delete", "-n", "rl", "pod/sums-critic-0", "--force", "--grace-period=0")
    assert not [line for line in following if line.level == "info"]
    has_status(kubernetes, {"phase": "Running"})


def test_kubectl_runs_the_plugin(kubernetes: Kubernetes, job: str, tmp_path: Path) -> None:
    plugin = tmp_path / "kubectl-rlhf"
    plugin.write_text(f'#!/bin/sh\nexec {sys.executable} -m rlhfspec.plugin.main "$@"\n')
    plugin.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KUBECONFIG": str(kubernetes.kubeconfig)}
    from cluster.build import binaries_folder

    command = [str(binaries_folder() / "kubectl"), "rlhf", "logs", job, "-n", "rl", "--role", "reward"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "reward-0      info     scored  [sums/1/2/0]" in done.stdout


def test_get_run_through_a_pod_and_without_one(
    kubernetes: Kubernetes, cluster: Cluster, job: str, storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cluster.build import binaries_folder

    monkeypatch.setenv("PATH", f"{binaries_folder()}:{os.environ['PATH']}")

    def is_there(folder: Path) -> None:
        for name in ("steps.jsonl", "checkpoints/weights"):
            assert (folder / name).read_bytes() == (storage / "runs" / "sums" / name).read_bytes()

    assert fetch(cluster, job, tmp_path / "one", claim=None, image=None) == 2
    is_there(tmp_path / "one")
    kubernetes.kubectl("delete", "-n", "rl", "pods", "--all", "--force", "--grace-period=0")
    assert fetch(cluster, job, tmp_path / "two", claim="data", image=IMAGE) == 2
    is_there(tmp_path / "two")
    kubernetes.wait_for("the helper to be gone", lambda: not kubernetes.get("pods", "-n", "rl")["items"])
    has_status(kubernetes, {"run": {"folder": "/storage/runs/none"}})
    with pytest.raises(ClusterUnavailable, match="runs/none"):
        fetch(cluster, job, tmp_path / "three", claim="data", image=IMAGE)
    kubernetes.wait_for("the helper to be gone", lambda: not kubernetes.get("pods", "-n", "rl")["items"])
