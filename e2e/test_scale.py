"""200 jobs with 2,000 pods that kwok pretends to run: what the operator needs, that it is still when they are, and that
another replica takes over from one that is killed in the midst of them.

The API server, its store, the scheduler and kwok share the machine with the operator, so what is asserted is what that
does not change: the operator's own CPU time, its memory, and how often it looks and writes. Times of the clock are
printed, with the load beside them.
"""

from __future__ import annotations

import http.client
import math
import os
import signal
import ssl
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cluster import ControlPlane
from cluster.build import binaries_folder
from kubernetes import client
from operators import (
    RELEASE_NAMESPACE,
    Operator,
    World,
    define,
    example,
    grant,
    replica_pod,
    stopped_at_the_end,
    token_of,
    until,
    writes_of,
)
from shared_servers import SharedServers

from rlhfspec.cluster import names
from rlhfspec.cluster.report import Report

JOBS = int(os.environ.get("E2E_JOBS", "200"))
NODES, GENERATORS = 20, 4
QUIET_SECONDS, REPORT_SECONDS = 90.0, 20.0
STILL_SECONDS = 15.0  # without a write: everything has come in
STAGES = Path(__file__).parent / "kwok.yaml"
LOOK, DECIDE, WAITED = (f"rlhfspec_operator_{name}_seconds" for name in ("reconcile", "decide_cpu", "queue"))
Metrics = dict[str, float]


@pytest.fixture(scope="module")
def kubernetes() -> Iterator[ControlPlane]:
    """Without controllers: kwok's nodes need no heartbeat then."""
    with ControlPlane(controllers=False, scheduler=True) as plane:
        define(plane)
        options = ["--manage-all-nodes", "--config", STAGES]
        plane.processes.start("kwok", [binaries_folder() / "kwok", "--kubeconfig", plane.kubeconfig, *options])
        yield plane


@pytest.fixture(scope="module")
def world(kubernetes: ControlPlane) -> World:
    world = World(kubernetes)
    for name in (RELEASE_NAMESPACE, "many"):
        world.namespace(name)
    add_claim(world, {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}})
    add_nodes(world)
    return world


@pytest.mark.timeout(2400)
def test_an_operator_handles_many_jobs_and_another_takes_over(
    kubernetes: ControlPlane, world: World, tmp_path: Path
) -> None:
    with tempfile.TemporaryDirectory() as folder, SharedServers(Path(folder)) as servers:
        kubeconfig = grant(kubernetes, ("many",))
        for name in ("a", "b"):
            replica_pod(world, f"rl-operator-{name}")
        operator = Operator(tmp_path / "a", kubeconfig, servers, namespaces=("many",), pod="rl-operator-a")
        with stopped_at_the_end(operator):
            until(lambda: operator.acts, "it acts")
            all_begin(world, operator)
            with controls_report(world, operator, servers) as controls:
                is_still(operator)
                stays_still(kubernetes, operator)
                other = Operator(tmp_path / "b", kubeconfig, servers, namespaces=("many",), pod="rl-operator-b")
                with stopped_at_the_end(other):
                    another_takes_over(kubernetes, world, operator, other, controls)


def all_begin(world: World, operator: Operator) -> None:
    before, cpu, began = operator.metrics(), operator.cpu_seconds, time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda number: create(world, f"job-{number}"), range(JOBS)))
    until(lambda: phases(world)["Running"] == JOBS, "all jobs run", seconds=900)
    num_pods = len(world.core.list_namespaced_pod("many", limit=5000).items)
    print(f"{JOBS} jobs, {num_pods} pods, all running after {time.monotonic() - began:.0f} s")
    show("burst", Window(before, operator.metrics(), operator.cpu_seconds - cpu, time.monotonic() - began), operator)
    assert num_pods >= 10 * JOBS


def is_still(operator: Operator) -> None:
    """Nothing has been written for a while."""
    last, since = operator.num_writes, time.monotonic()
    while time.monotonic() - since < STILL_SECONDS:
        time.sleep(1.0)
        if (now := operator.num_writes) != last:
            last, since = now, time.monotonic()


def stays_still(kubernetes: ControlPlane, operator: Operator) -> None:
    before, cpu, began, since = operator.metrics(), operator.cpu_seconds, time.monotonic(), datetime.now(UTC)
    time.sleep(QUIET_SECONDS)  # what is measured is that nothing happens
    seconds = time.monotonic() - began
    window = Window(before, operator.metrics(), operator.cpu_seconds - cpu, seconds)
    show("idle", window, operator)
    writes = Counter(name.partition(".")[0] for _, name, _ in writes_of(kubernetes, operator, since))
    print(f"idle: writes by job, from the audit log: {dict(writes)}")
    assert max(writes.values(), default=0) < max(seconds / 60, 1)
    assert window.count(LOOK) <= JOBS * (seconds / 15 + seconds / REPORT_SECONDS + 2)  # no hot loop
    assert window.quantile(DECIDE, 0.99) <= 0.1
    assert operator.rss_bytes < 300 * 2**20


def another_takes_over(
    kubernetes: ControlPlane, world: World, leader: Operator, other: Operator, controls: Controls
) -> None:
    """In the midst of 2,000 pods: it finds them as they are, and there is nothing to write."""
    until(lambda: other.metrics(), "the other stands by")
    uids = uids_of(world)
    since, began = datetime.now(UTC), time.monotonic()
    leader.kill(signal.SIGKILL)
    until(lambda: other.acts, "the other acts", seconds=60)
    acts_after, controls.operator = time.monotonic() - began, other
    until(lambda: other.metrics().get(f"{LOOK}_count", 0.0) >= JOBS, "it has looked at every job", seconds=120)
    seen_after = time.monotonic() - began
    print(f"leader killed: another acts after {acts_after:.1f} s, has looked at all after {seen_after:.1f} s")
    print(f"memory of the other: {other.rss_bytes / 2**20:.0f} MB")
    assert uids_of(world) == uids
    wrote = Counter(what for namespace, _, what in writes_of(kubernetes, other, since) if namespace == "many")
    print(f"its writes: {dict(wrote)}")
    assert wrote == {}
    assert acts_after < 15


# ---- what is measured -----------------------------------------------------------------------------------------------


class Window:
    """Of the operator's metrics: what came between two readings."""

    def __init__(self, before: Metrics, after: Metrics, cpu_seconds: float, seconds: float) -> None:
        self.between = {name: value - before.get(name, 0.0) for name, value in after.items()}
        self.cpu_seconds, self.seconds = cpu_seconds, seconds

    def count(self, histogram: str) -> float:
        return self.between[f"{histogram}_count"]

    def quantile(self, histogram: str, share: float) -> float:
        """The upper end of the bucket it lies in."""
        buckets = [(name, count) for name, count in self.between.items() if name.startswith(f"{histogram}_bucket")]
        least = share * self.count(histogram)
        bounds = [float(name.partition('le="')[2].rstrip('"}')) for name, count in buckets if count >= least]
        return min(bounds, default=math.inf)

    @property
    def num_writes(self) -> float:
        return sum(n for name, n in self.between.items() if name.startswith("rlhfspec_operator_api_writes_total"))


def show(what: str, window: Window, operator: Operator) -> None:
    looks = window.count(LOOK)
    print(f"{what}: {window.seconds:.0f} s, load average {os.getloadavg()[0]:.1f}")
    a_look, share = 1000 * window.cpu_seconds / max(looks, 1), 100 * window.cpu_seconds / window.seconds
    print(f"{what}: {looks:.0f} looks, {window.num_writes:.0f} writes")
    print(f"{what}: CPU of the operator {window.cpu_seconds:.1f} s, {share:.0f}%, {a_look:.1f} ms a look")
    for name, histogram in (("look", LOOK), ("CPU of its decision", DECIDE), ("wait for it", WAITED)):
        p50, p99 = (window.quantile(histogram, share) for share in (0.5, 0.99))
        print(f"{what}: {name}: p50 <= {p50} s, p99 <= {p99} s")
    print(f"{what}: memory {operator.rss_bytes / 2**20:.0f} MB at most")


def phases(world: World) -> Counter[str]:
    time.sleep(3.0)  # a list of everything costs the API server more than what is measured
    listed = world.jobs.list_namespaced_custom_object(names.GROUP, names.VERSION, "many", names.PLURAL)
    return Counter(job.get("status", {}).get("phase", "") for job in listed["items"])


def uids_of(world: World) -> dict[str, str]:
    return {name: pod.metadata.uid for name, pod in world.pods("many").items()}


# ---- what goes on ---------------------------------------------------------------------------------------------------


def create(world: World, name: str) -> None:
    job = example(name)
    job["spec"]["roles"] = {"generator": {"workers": GENERATORS}}
    jobs = client.CustomObjectsApi(world.kubernetes.client())
    jobs.create_namespaced_custom_object(names.GROUP, names.VERSION, "many", names.PLURAL, job)


class Controls(threading.Thread):
    """Of all jobs: each says the same every 20 s, for it waits. `operator`: who is told, as the Service would have it;
    `runs`: the run of each job."""

    def __init__(
        self, operator: Operator, servers: SharedServers, runs: dict[str, str], tokens: dict[str, str]
    ) -> None:
        super().__init__()
        self.operator = operator
        self.left = threading.Event()
        self._tls = ssl.create_default_context(cadata=servers.keys.ca_pem.decode())
        self._runs, self._tokens = runs, tokens

    def run(self) -> None:
        told, connection = self.operator, self._connection()
        while True:
            for job, run in self._runs.items():
                if self.left.wait(REPORT_SECONDS / len(self._runs)):
                    return
                if told is not self.operator:
                    told, connection = self.operator, self._connection()
                body = Report(run=run, step=1, total_steps=30).model_dump_json()
                headers = {"Authorization": f"Bearer {self._tokens[job]}"}
                try:
                    connection.request("POST", names.report_path("many", job), body, headers)
                    connection.getresponse().read()
                except (OSError, http.client.HTTPException):
                    connection.close()  # it was killed

    def _connection(self) -> http.client.HTTPSConnection:
        return http.client.HTTPSConnection("127.0.0.1", self.operator.reports, context=self._tls, timeout=30)


@contextmanager
def controls_report(world: World, operator: Operator, servers: SharedServers) -> Iterator[Controls]:
    listed = world.jobs.list_namespaced_custom_object(names.GROUP, names.VERSION, "many", names.PLURAL)["items"]
    runs = {job["metadata"]["name"]: job["status"]["run"]["uid"] for job in listed}
    with ThreadPoolExecutor(4) as pool:
        made = pool.map(lambda job: token_of(world, "many", names.pod_name(job, names.CONTROL, 0)), runs)
        controls = Controls(operator, servers, runs, dict(zip(runs, made, strict=True)))
    controls.start()
    try:
        yield controls
    finally:
        controls.left.set()
        controls.join()


def add_nodes(world: World) -> None:
    for number in range(NODES):
        body = {"metadata": {"name": f"fake-{number}", "labels": {"type": "kwok"}}, "spec": {"taints": []}}
        world.core.create_node(body)
        world.core.patch_node(f"fake-{number}", {"spec": {"taints": None}})  # admission taints what is new


def add_claim(world: World, claim: dict[str, object]) -> None:
    """Bound by hand: there is no controller that does."""
    volume = {"capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteMany"], "hostPath": {"path": "/tmp"}}
    owner = {"claimRef": {"namespace": "many", "name": "shared"}}
    world.core.create_persistent_volume({"metadata": {"name": "shared"}, "spec": volume | owner})
    world.core.create_namespaced_persistent_volume_claim(
        "many",
        {
            "metadata": {"name": "shared", "annotations": {"pv.kubernetes.io/bind-completed": "yes"}},
            "spec": claim | {"storageClassName": "", "volumeName": "shared"},
        },
    )
    world.core.patch_namespaced_persistent_volume_claim_status("shared", "many", {"status": {"phase": "Bound"}})
    uid = world.core.read_namespaced_persistent_volume_claim("shared", "many").metadata.uid
    world.core.patch_persistent_volume("shared", {"spec": {"claimRef": {"uid": uid}}})
    world.core.patch_persistent_volume_status("shared", {"status": {"phase": "Bound"}})
