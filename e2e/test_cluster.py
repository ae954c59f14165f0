"""The cluster itself: what it promises to the tests that stand on it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import Cluster, ControlPlane
from cluster.guardian import CGROUPS
from cluster.instance import scratch
from manifests import ends, pod, policy, service

CLUSTER = {"images": ["cpu", "nats", "redis", "slim"], "gpus": 2}
TORCH = """
import socket, torch
from rlhfspec.kernels.cpu import build
assert build.load() is not None, build.unavailable_reason()
assert socket.gethostbyname("kubernetes.default.svc.cluster.local").endswith(".128.1")
open("/storage/answer", "w").write(f"{(torch.ones(2, 3) @ torch.ones(3, 2)).sum():.0f} {torch.cuda.is_available()}")
"""


@pytest.mark.ci
def test_two_nodes_are_ready(cluster: Cluster) -> None:
    nodes = cluster.get("nodes")["items"]
    ready = [c["status"] for node in nodes for c in node["status"]["conditions"] if c["type"] == "Ready"]
    assert len(cluster.nodes) == 2
    assert ready == ["True"] * len(nodes)


@pytest.mark.ci
def test_a_restricted_pod_runs_torch_our_kernels_and_finds_names(cluster: Cluster) -> None:
    cluster.kubectl("label", "namespace", "default", "pod-security.kubernetes.io/enforce=restricted")
    folder = cluster.volume("shared")
    volume = {"name": "storage", "persistentVolumeClaim": {"claimName": "shared"}}
    mount = {"volumeMounts": [{"name": "storage", "mountPath": "/storage"}]}
    image = "localhost/rlhfspec:cpu"
    cluster.apply(pod("torch", "python", "-c", TORCH, image=image, container=mount, volumes=[volume]))
    ends(cluster, "torch", seconds=170)
    assert (folder / "answer").read_text() == "12 False"


@pytest.mark.ci
def test_the_slim_image_has_what_the_operator_needs_and_no_torch(cluster: Cluster) -> None:
    code = "import importlib.util, nats, redis.asyncio, rlhfspec.operator; print(importlib.util.find_spec('torch'))"
    cluster.apply(pod("slim", "python", "-c", code, image="localhost/rlhfspec:slim"))
    assert ends(cluster, "slim").splitlines()[-1] == "None"


def test_the_servers_start_restricted(cluster: Cluster) -> None:
    cluster.apply(
        pod("nats", "/nats-server", "--version", image="localhost/nats:2.12"),
        pod("redis", "/usr/bin/redis-server", "--port", "0", "--tls-port", "6379", image="localhost/redis:7"),
    )
    assert "v2.12.2" in ends(cluster, "nats")
    assert "Failed to configure TLS" in ends(cluster, "redis", "Failed"), "it can, but has no certificate here"


def reaches(cluster: Cluster, source: str, target: str, port: int = 8080) -> bool:
    said = cluster.kubectl("exec", source, "--", "nc", "-w", "2", target, str(port), "-e", "true", check=False)
    return "command terminated" not in said


@pytest.fixture(scope="module")
def talkers(cluster: Cluster) -> dict[str, str]:
    """Addresses by name: a server on node 1, a friend and a stranger on each node."""
    serve = ("sh", "-c", "while true; do nc -l -p 8080 -e true; done")
    names = {"server": 0, "friend1": 0, "friend2": 1, "stranger1": 0, "stranger2": 1}
    for name, node in names.items():
        kind = {"kind": name.rstrip("12")}
        probe = {"readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1}}
        where = {"kubernetes.io/hostname": cluster.nodes[node].name}
        cluster.apply(pod(name, *serve, labels=kind, container=probe, nodeSelector=where))
    cluster.apply(service("server", 8080))
    cluster.kubectl("wait", *(f"pod/{name}" for name in names), "--for=condition=Ready", "--timeout=90s")
    return {name: cluster.get("pod", name)["status"]["podIP"] for name in names}


@pytest.mark.ci
def test_what_a_policy_does_not_allow_is_denied(cluster: Cluster, talkers: dict[str, str]) -> None:
    everybody = ["friend1", "friend2", "stranger1", "stranger2"]
    assert all(reaches(cluster, each, talkers["server"]) for each in everybody)
    server = {"matchLabels": {"app": "server"}}
    friends = {"podSelector": {"matchLabels": {"kind": "friend"}}}
    cluster.apply(policy("inbound", server, ingress=[{"from": [friends], "ports": [{"port": 8080}]}]))
    cluster.wait_for("strangers denied", lambda: not reaches(cluster, "stranger1", talkers["server"]), seconds=10)
    for target in (talkers["server"], "server"):  # by its own address, and through the Service
        assert [each for each in everybody if reaches(cluster, each, target)] == ["friend1", "friend2"]
    cluster.apply(policy("outbound", {"matchLabels": {"app": "friend1"}}, egress=[]))
    cluster.wait_for("nothing goes out", lambda: not reaches(cluster, "friend1", talkers["server"]), seconds=10)
    assert not reaches(cluster, "friend1", talkers["stranger2"])
    assert reaches(cluster, "stranger2", talkers["friend1"]), "answers go out"
    # The kubelet's probes come through whatever is denied.
    states = [cluster.get("pod", each)["status"]["containerStatuses"][0]["ready"] for each in ("server", "friend1")]
    assert states == [True, True]
    cluster.kubectl("delete", "networkpolicy", "--all")
    cluster.wait_for("allowed again", lambda: reaches(cluster, "stranger1", talkers["server"]), seconds=10)


@pytest.mark.own
def test_gpus_are_counted_given_and_lost(cluster: Cluster) -> None:
    wants = {"resources": {"limits": {"nvidia.com/gpu": 2}}}
    show = ("sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES; sleep 600")
    for number in (1, 2, 3):
        cluster.apply(pod(f"gpu{number}", *show, container=wants))
    running = "jsonpath={.items[?(@.status.phase=='Running')].metadata.name}"

    def names() -> list[str]:
        return [name for name in cluster.kubectl("get", "pods", "-o", running).split() if name.startswith("gpu")]

    cluster.wait_for("two of three to run", lambda: len(names()) == 2)
    assert cluster.kubectl("logs", names()[0]).strip() in ("gpu0,gpu1", "gpu1,gpu0")
    cluster.kubectl("delete", "pod", names()[0])
    cluster.wait_for("the third to get what the first had", lambda: "gpu3" in names())
    cluster.set_gpus(cluster.nodes[0], 1)
    cluster.wait_for("a broken GPU to be missed", lambda: cluster.gpus(cluster.nodes[0]) == 1)


@pytest.mark.own
def test_every_request_is_in_the_audit_log(cluster: Cluster) -> None:
    config = cluster.kubeconfig_of("somebody")
    refused = cluster.kubectl(f"--kubeconfig={config}", "get", "secrets", check=False)
    assert "forbidden" in refused
    mine = [event for event in cluster.audit() if event["user"]["username"] == "somebody"]
    asked = [
        (event["verb"], event["responseStatus"]["code"])
        for event in mine
        if event.get("objectRef", {}).get("resource") == "secrets"
    ]
    assert asked == [("list", 403)]


def test_a_node_that_is_cut_off_is_missed_and_comes_back(cluster: Cluster) -> None:
    node = cluster.nodes[1]

    def is_ready() -> str:
        ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
        return cluster.kubectl("get", "node", node.name, "-o", ready)

    cluster.cut(node)
    cluster.wait_for("the node to be missed", lambda: is_ready() == "Unknown")
    cluster.heal(node)
    cluster.wait_for("the node to be back", lambda: is_ready() == "True")


def left_behind(number: int) -> list[str]:
    """Of an instance, on this machine."""
    name = f"rlhf{number}"
    found = [
        *Path("/sys/class/net").glob(f"{name}*"),
        *Path("/run/netns").glob(f"{name}n*"),
        *CGROUPS.glob(f"*/{name}-*"),
    ]
    found += [path for path in [scratch() / str(number)] if path.exists()]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if f"{scratch()}/{number}/" in line]
    commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [*map(str, found), *mounts, *(line for line in commands if f"{scratch()}/{number}/" in line)]


def switches() -> list[str]:
    names = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops", "net/ipv4/ip_forward")
    return [Path("/proc/sys", name).read_text() for name in names]


@pytest.mark.own
@pytest.mark.ci
def test_nothing_is_left_after_stop() -> None:
    before = (
        switches(),
        subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout.count("-A"),
    )
    with Cluster(nodes=1, small_volume_mb=1) as second:
        second.volume("small", small=True)
        mount = {"volumeMounts": [{"name": "small", "mountPath": "/small"}]}
        volume = {"name": "small", "persistentVolumeClaim": {"claimName": "small"}}
        fill = ("sh", "-c", "dd if=/dev/zero of=/small/zeros bs=1M count=2; sleep 600")
        second.apply(pod("one", *fill, container=mount, volumes=[volume]))
        second.kubectl("wait", "pod/one", "--for=condition=Ready", "--timeout=240s")
        second.wait_for("the volume to be full", lambda: "No space left" in second.kubectl("logs", "one"))
        number = second.instance.number
        assert left_behind(number), "this test would find nothing anyway"
    assert left_behind(number) == []
    after = switches(), subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout.count("-A")
    assert after == before


@pytest.mark.own
def test_nothing_is_left_when_the_test_process_is_killed() -> None:
    code = "from cluster import Cluster; c = Cluster(nodes=1); c.start(); print(c.instance.number, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    number = int(child.stdout.readline())
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    ControlPlane().wait_for("everything to be gone", lambda: left_behind(number) == [], seconds=60)


@pytest.mark.own
@pytest.mark.ci
def test_pods_get_ready_on_kwok_nodes_of_a_lone_control_plane() -> None:
    with ControlPlane(scheduler=True) as plane:
        plane.start_kwok(20, gpus=8)
        tolerate = [{"key": "kwok.x-k8s.io/node", "operator": "Exists"}]
        pods = [pod(f"p{number}", nodeSelector={"type": "kwok"}, tolerations=tolerate) for number in range(50)]
        plane.apply(*pods)
        plane.kubectl("wait", "pods", "--all", "--for=condition=Ready", "--timeout=120s")
        assert len(plane.get("nodes")["items"]) == 20
        assert json.loads(plane.kubectl("get", "--raw", "/version"))["minor"] == "34"
