"""Jobs in queues of Kueue itself: its controllers, its scheduler, its webhooks. The tests play the kubelet.

Not run here: nodes, so no pod is ever scheduled where a flavor says; admission checks; topologies; MultiKueue.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cluster import ControlPlane, kueue, why_no_kueue
from kubernetes import client
from operators import (
    RELEASE_NAMESPACE,
    USER,
    Operator,
    World,
    define,
    grant,
    replica_pod,
    stages_of,
    stopped_at_the_end,
    until,
)
from shared_servers import SharedServers
from verbs import bound, refused, unused

from rlhfspec.cluster import names

pytestmark = pytest.mark.skipif(bool(why_no_kueue()), reason=why_no_kueue())
NAMESPACES = ("turns", "evicted", "preempted", "deleted", "asks", "foreign")
SPOT = {"key": "spot", "operator": "Exists", "effect": "NoSchedule"}
# One job of the example has a trainer that asks for one GPU, and the queue has one.
ONE_GPU = {"trainer": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}


@pytest.fixture(scope="module")
def plane() -> Iterator[ControlPlane]:
    with ControlPlane() as plane:
        define(plane)
        plane.start_kueue()
        yield plane


@pytest.fixture(scope="module")
def world(plane: ControlPlane) -> World:
    world = World(plane)
    quota = {"nvidia.com/gpu": "1"}
    for name in (RELEASE_NAMESPACE, *NAMESPACES):
        world.namespace(name)
        plane.apply(*kueue.queue(name, name, labels={"pool": name}, tolerations=[SPOT], **quota))
    return world


@pytest.fixture(scope="module")
def operator(plane: ControlPlane, world: World, servers: SharedServers, tmp_path_factory: Any) -> Iterator[Operator]:
    """With the rights that `rbac` says, and no other."""
    kubeconfig = grant(plane, NAMESPACES, kueue=True)
    replica_pod(world, "rl-operator-a")
    folder = tmp_path_factory.mktemp("operator") / "a"
    operator = Operator(folder, kubeconfig, servers, namespaces=NAMESPACES, pod="rl-operator-a", kueue=True)
    with stopped_at_the_end(operator):
        yield operator
    assert "rror" not in operator.log.replace("ClientConnectorError", ""), operator.log


def apply(world: World, namespace: str, name: str, **scheduling: Any) -> None:
    told = {"gang": "kueue", "queue": namespace, **scheduling}
    world.apply(namespace, name, {"scheduling": told, "roles": ONE_GPU})


def to_running(world: World, namespace: str, job: str) -> None:
    until(lambda: f"{job}-prepare-0" in world.pods(namespace), "prepare is made")
    world.ends(namespace, f"{job}-prepare-0")
    world.wait_for_phase(namespace, job, "Starting")
    running = stages_of(world, namespace, job)
    until(lambda: running <= set(world.pods(namespace)), f"all of {running}")
    for pod in running:
        world.runs(namespace, pod)
    world.wait_for_phase(namespace, job, "Running")


def pods_of(world: World, namespace: str, job: str) -> dict[str, Any]:
    return {name: pod for name, pod in world.pods(namespace).items() if name.startswith(f"{job}-")}


def workload(world: World, namespace: str, job: str) -> dict[str, Any] | None:
    uid = (world.job(namespace, job) or {"metadata": {"uid": ""}})["metadata"]["uid"]
    try:
        found: dict[str, Any] = world.jobs.get_namespaced_custom_object(
            "kueue.x-k8s.io", "v1beta2", namespace, "workloads", names.workload_name(job, uid)
        )
        return found
    except client.ApiException as error:
        if error.status == 404:
            return None
        raise


def condition(found: dict[str, Any] | None, type_: str) -> str:
    conditions = (found or {}).get("status", {}).get("conditions", ())
    return next((each["status"] for each in conditions if each["type"] == type_), "")


def edit_workload(world: World, namespace: str, job: str, spec: dict[str, Any]) -> None:
    found = workload(world, namespace, job)
    assert found is not None
    world.jobs.patch_namespaced_custom_object(
        "kueue.x-k8s.io", "v1beta2", namespace, "workloads", found["metadata"]["name"], {"spec": spec}
    )


def end_all(world: World, namespace: str, job: str) -> None:
    """Whatever was asked to end does, as a kubelet makes it; what had ended before may be gone by then."""
    for name, pod in pods_of(world, namespace, job).items():
        if pod.metadata.deletion_timestamp is not None:
            with suppress(client.exceptions.NotFoundException):
                world.core.delete_namespaced_pod(name, namespace, grace_period_seconds=0)


def test_two_jobs_take_turns_where_there_is_room_for_one(world: World, operator: Operator) -> None:
    apply(world, "turns", "first")
    to_running(world, "turns", "first")
    pod = world.pods("turns")["first-trainer-0"]
    assert pod.spec.node_selector == {"pool": "turns"}
    assert "spot" in {toleration.key for toleration in pod.spec.tolerations}
    until(lambda: condition(workload(world, "turns", "first"), "PodsReady") == "True", "Kueue knows that it runs")
    apply(world, "turns", "second")
    status = world.wait_for_reason("turns", "second", "Queued")
    assert status["phase"] == "Pending"
    assert not pods_of(world, "turns", "second")
    said = until(lambda: (text := world.status("turns", "second")["message"]) and "quota" in text and text, "why")
    assert said.startswith("queue turns: "), said
    assert "nvidia.com/gpu" in said
    world.ends("turns", "first-trainer-0", 0, "completed: step 30")
    until(lambda: condition(workload(world, "turns", "first"), "Finished") == "True", "its quota is free")
    to_running(world, "turns", "second")
    assert world.status("turns", "second")["reason"] == ""


def test_a_deactivated_workload_ends_the_trainer_first_and_resumes_later(world: World, operator: Operator) -> None:
    apply(world, "evicted", "sums")
    to_running(world, "evicted", "sums")
    bind(world, "evicted", "sums")
    others = stages_of(world, "evicted", "sums") - {"sums-trainer-0"}
    edit_workload(world, "evicted", "sums", {"active": False})
    asked = until(lambda: going(world, "evicted", "sums"), "somebody is asked to end")
    assert asked == {"sums-trainer-0"}
    world.wait_for_phase("evicted", "sums", "Suspending")
    assert condition(workload(world, "evicted", "sums"), "QuotaReserved") == "True", "its pods still need it"
    end_all(world, "evicted", "sums")
    until(lambda: others <= going(world, "evicted", "sums"), "then the others")
    end_all(world, "evicted", "sums")
    status = world.wait_for_phase("evicted", "sums", "Pending")
    assert (status["reason"], status["message"]) == (
        "Queued",
        "Kueue evicted the job (Deactivated): The workload is deactivated",
    )
    until(lambda: condition(workload(world, "evicted", "sums"), "QuotaReserved") == "False", "the quota is back")
    apply(world, "evicted", "other")
    to_running(world, "evicted", "other")
    world.jobs.delete_namespaced_custom_object(names.GROUP, names.VERSION, "evicted", names.PLURAL, "other")
    edit_workload(world, "evicted", "sums", {"active": True})
    to_running(world, "evicted", "sums")
    assert world.status("evicted", "sums")["run"]["number"] == 2


def test_a_more_important_job_preempts(world: World, operator: Operator) -> None:
    for name, value in (("low", 1), ("high", 1000)):
        body = {"metadata": {"name": name}, "value": value}
        client.SchedulingV1Api(world.kubernetes.client()).create_priority_class(body)
    apply(world, "preempted", "humble", priorityClass="low")
    to_running(world, "preempted", "humble")
    apply(world, "preempted", "proud", priorityClass="high")
    to_running(world, "preempted", "proud")
    status = world.wait_for_reason("preempted", "humble", "Queued")
    assert status["phase"] == "Pending"
    assert workload(world, "preempted", "proud")["spec"]["priority"] == 1000  # type: ignore[index]
    world.ends("preempted", "proud-trainer-0", 0, "completed: step 30")
    to_running(world, "preempted", "humble")


def test_a_deleted_job_leaves_the_queue(world: World, operator: Operator) -> None:
    apply(world, "deleted", "first")
    to_running(world, "deleted", "first")
    apply(world, "deleted", "second")
    world.wait_for_reason("deleted", "second", "Queued")
    made = workload(world, "deleted", "second")
    assert made is not None
    for job in ("second", "first"):
        world.jobs.delete_namespaced_custom_object(names.GROUP, names.VERSION, "deleted", names.PLURAL, job)
    until(lambda: not workloads(world, "deleted"), "Kubernetes removes what was theirs")


def test_a_job_that_asks_for_too_much_says_what_there_is(world: World, operator: Operator) -> None:
    two = {"trainer": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}
    world.apply("asks", "sums", {"scheduling": {"gang": "kueue", "queue": "asks"}, "roles": two})
    world.wait_for_reason("asks", "sums", "Queued")
    until(lambda: "insufficient quota" in world.status("asks", "sums")["message"], "Kueue's own words")
    before = workload(world, "asks", "sums")
    world.kubernetes.kubectl(
        "patch", "rlhf", "sums", "-n", "asks", "--type=merge",
        "-p", '{"spec": {"roles": {"trainer": {"resources": {"limits": {"nvidia.com/gpu": 1}}}}}}',
    )  # fmt: skip
    to_running(world, "asks", "sums")
    after = workload(world, "asks", "sums")
    assert before is not None
    assert after is not None
    assert before["metadata"]["uid"] != after["metadata"]["uid"]
    world.kubernetes.kubectl("patch", "rlhf", "sums", "-n", "asks", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    world.wait_for_phase("asks", "sums", "Suspended")
    until(lambda: not workloads(world, "asks"), "who is suspended stands in no queue")


def test_a_job_of_another_manager_is_left_alone(world: World, operator: Operator) -> None:
    manager = "kueue.x-k8s.io/multikueue"
    world.apply("foreign", "theirs", {"managedBy": manager})
    world.apply("foreign", "ours", {"managedBy": "rlhfspec.io/operator"})
    world.wait_for_pods("foreign", {"ours-prepare-0"})
    assert world.status("foreign", "theirs") == {}
    events = world.core.list_namespaced_event("foreign").items
    assert {event.involved_object.name for event in events if event.involved_object.kind == names.KIND} == {"ours"}
    with pytest.raises(client.ApiException, match="cannot be changed; make another job"):
        world.jobs.patch_namespaced_custom_object(
            names.GROUP, names.VERSION, "foreign", names.PLURAL, "theirs", {"spec": {"managedBy": None}}
        )


def test_without_kueue_a_job_says_so(kubernetes: ControlPlane, servers: SharedServers, tmp_path: Path) -> None:
    world = World(kubernetes)
    for name in (RELEASE_NAMESPACE, "alone"):
        world.namespace(name)
    replica_pod(world, "rl-operator-b")
    kubeconfig = grant(kubernetes, ("alone",), kueue=True)
    operator = Operator(tmp_path / "b", kubeconfig, servers, namespaces=("alone",), pod="rl-operator-b", kueue=True)
    with stopped_at_the_end(operator):
        apply(world, "alone", "sums")
        world.apply("alone", "free")
        message = world.wait_for_reason("alone", "sums", "Queued")["message"]
        assert "404 page not found; is Kueue installed" in message
        until(lambda: "free-prepare-0" in world.pods("alone"), "nobody else waits")


def test_the_operator_uses_all_its_rights_on_kueue_and_no_others(
    plane: ControlPlane, world: World, operator: Operator
) -> None:
    """Of Kueue's; `test_operator.py` looks at the others."""
    audit = list(plane.audit())
    assert refused(audit, USER) == set()
    ours = {what for what in unused(bound(plane), audit, USER) if what[1] in ("kueue.x-k8s.io", "scheduling.k8s.io")}
    assert ours == set()


def going(world: World, namespace: str, job: str) -> set[str]:
    return {name for name, pod in pods_of(world, namespace, job).items() if pod.metadata.deletion_timestamp}


def workloads(world: World, namespace: str) -> list[Any]:
    found: list[Any] = world.jobs.list_namespaced_custom_object("kueue.x-k8s.io", "v1beta2", namespace, "workloads")[
        "items"
    ]
    return found


def bind(world: World, namespace: str, job: str) -> None:
    """To a node that never answers, so that a pod that is asked to end stays until the test ends it."""
    for name in pods_of(world, namespace, job):
        target = {"apiVersion": "v1", "kind": "Node", "name": "nowhere"}
        body = {"metadata": {"name": name}, "target": target}
        world.core.create_namespaced_pod_binding(name, namespace, body, _preload_content=False)
