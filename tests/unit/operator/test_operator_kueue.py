"""A job in a Kueue queue has one Workload, which opens and closes its run."""

from typing import Any

import pytest
from operator_world import SETTINGS, World, job_body

from rlhfspec.operator.allowed_fields import Allowed
from rlhfspec.operator.deciding.observed import Refusal
from rlhfspec.operator.making.workloads import Workloads

KUEUE = SETTINGS.model_copy(update={"kueue": True, "allowed": Allowed(code_roles=("generator",))})
QUEUED = {"scheduling": {"gang": "kueue", "queue": "gpus"}}
SPOT = {"nodeLabels": {"pool": "spot"}, "tolerations": [{"key": "spot", "operator": "Exists"}]}


def queued(**changes: Any) -> World:
    world = World(job_body(**{**QUEUED, **changes}), settings=KUEUE, flavors={"spot": SPOT})
    world.settle()
    return world


def running(**changes: Any) -> World:
    world = queued(**changes)
    world.admit()
    world.to_running()
    return world


def pod_sets(world: World) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in world.workload["spec"]["podSets"]}


def kueue_knows(world: World, type_: str) -> dict[str, Any]:
    return next((each for each in world.workload["status"]["conditions"] if each["type"] == type_), {})


# --- what Kueue is told ----------------------------------------------------------------------------------------------


def test_the_workload_requests_all_roles_that_run_together() -> None:
    gpu = {"limits": {"nvidia.com/gpu": 1}}
    template = {"spec": {"nodeSelector": {"zone": "a"}, "initContainers": [{"name": "wait", "image": "busybox"}]}}
    generator = {"workers": 2, "replicas": {"min": 1, "max": 3}, "resources": gpu, "podTemplate": template}
    sets = pod_sets(queued(roles={"generator": generator, "reward": {"workers": 2}}))
    assert {role: each["count"] for role, each in sets.items()} == {
        "control": 1, "prompts": 1, "generator": 3, "reward": 2, "trainer": 1, "rebalancer": 1,
    }  # fmt: skip
    spec = sets["generator"]["template"]["spec"]
    assert (spec["nodeSelector"], spec["containers"][0]["resources"]) == ({"zone": "a"}, gpu)
    assert spec["initContainers"] == [{"name": "wait", "image": "busybox"}]
    assert "env" not in spec["containers"][0], "what changes from run to run is none of Kueue's business"


def test_a_workload_has_room_for_every_role() -> None:
    """Kueue takes eight sets of pods."""
    world = queued(
        roles={"generator": {"replicas": {"min": 1, "max": 2}}},
        algorithm={"name": "ppo", "klCoefficient": 0.1},
        model={"path": "tiny:llama", "critic": "tiny:critic"},
    )
    assert len(pod_sets(world)) == 8


def test_the_priority_class_goes_with_its_number() -> None:
    scheduling = {**QUEUED["scheduling"], "priorityClass": "high"}
    world = World(job_body(scheduling=scheduling), settings=KUEUE, priorities={"high": 7})
    world.settle()
    spec = world.workload["spec"]
    assert spec["priorityClassRef"] == {"group": "scheduling.k8s.io", "kind": "PriorityClass", "name": "high"}
    assert (spec["priority"], spec["queueName"]) == (7, "gpus")


def test_a_job_without_a_queue_name_uses_the_queue_default() -> None:
    world = queued(scheduling={"gang": "kueue"})
    assert world.workload["spec"]["queueName"] == "default"


def test_a_queued_job_fails_if_the_operator_has_no_kueue() -> None:
    world = World(job_body(**QUEUED))
    world.settle()
    assert (world.phase, world.status["reason"], world.workload) == ("Failed", "BadConfig", None)
    assert "operator.gang" in world.status["message"]


# --- a life ----------------------------------------------------------------------------------------------------------


def test_a_queued_job_shows_the_message_of_kueue_and_runs_once_admitted() -> None:
    world = queued()
    lacks = "insufficient unused quota for cpu in flavor spot, 2 more needed"
    world.kueue_says("QuotaReserved", False, "Pending", lacks)
    world.settle()
    assert (world.phase, world.status["reason"], world.pods) == ("Pending", "Queued", {})
    assert world.status["message"] == f"queue gpus: {lacks}"
    assert world.plan().is_quiet
    assert "startTime" not in world.status, "it may still be changed"
    world.admit()
    world.to_running()
    for name, pod in world.pods.items():
        assert pod["spec"]["nodeSelector"] == {"pool": "spot"}, name
        assert {"key": "spot", "operator": "Exists"} in pod["spec"]["tolerations"], name
        assert not any("kueue" in label for label in pod["metadata"]["labels"]), name
    assert kueue_knows(world, "PodsReady")["status"] == "True"
    assert world.status["reason"] == ""


def test_a_job_that_is_over_gives_its_quota_back_once_nothing_of_it_runs() -> None:
    world = running()
    world.end_pod("sums-trainer-0", 0, "completed: step 10").settle()
    assert not kueue_knows(world, "Finished"), "its pods still end"
    world.wind_down()
    assert world.phase == "Succeeded"
    finished = kueue_knows(world, "Finished")
    assert (finished["status"], finished["reason"]) == ("True", "Succeeded")


def test_a_wrong_job_leaves_the_queue_and_returns_when_corrected() -> None:
    world = queued()
    world.admit()
    world.workload_writes.clear()
    world.edit(rewards={"sources": []}).settle()
    assert (world.phase, kueue_knows(world, "Finished")["reason"]) == ("Failed", "Failed")
    world.edit(**{"rewards": job_body()["spec"]["rewards"]}).settle()
    assert world.workload_writes == ["status", "delete", "create"]
    assert (world.phase, world.pods) == ("Pending", {})


@pytest.mark.parametrize(("reason", "at_once"), [("Preempted", "True"), ("Deactivated", "False")])
def test_an_eviction_ends_the_trainer_first_and_then_the_run(reason: str, at_once: str) -> None:
    world = running()
    world.deletes.clear()
    world.evict(reason, "somebody else is more important")
    world.settle()
    assert [delete.name for delete in world.deletes] == ["sums-trainer-0"]
    assert (world.phase, world.status["reason"]) == ("Suspending", "Queued")
    assert kueue_knows(world, "QuotaReserved")["status"] == "True", "the pods still need it"
    world.wind_down()
    assert (world.phase, world.pods) == ("Pending", {})
    assert world.status["message"] == f"Kueue evicted the job ({reason}): somebody else is more important"
    assert "admission" not in world.workload["status"]
    conditions = {type_: kueue_knows(world, type_)["status"] for type_ in ("QuotaReserved", "Admitted", "PodsReady")}
    assert set(conditions.values()) == {"False"}, conditions
    requeued = kueue_knows(world, "Requeued")
    assert (requeued["status"], requeued["reason"]) == (at_once, reason)
    assert world.plan().is_quiet
    world.admit()
    world.to_running()
    assert world.status["run"]["number"] == 2


def test_a_suspended_job_has_no_workload_in_the_queue() -> None:
    world = running()
    world.edit(suspend=True).settle()
    assert world.workload is not None, "its pods still need the quota"
    world.wind_down()
    assert (world.phase, world.status["reason"], world.workload) == ("Suspended", "", None)
    world.edit(suspend=False).settle()
    assert world.workload is not None
    assert (world.phase, world.pods) == ("Pending", {})


def test_a_job_that_begins_anew_keeps_its_quota() -> None:
    world = running()
    world.workload_writes.clear()
    world.edit(restart={"id": "again"}).wind_down()
    assert (world.status["run"]["number"], world.workload_writes) == (2, [])


def test_a_changed_request_of_a_queued_job_makes_a_new_workload() -> None:
    world = queued()
    world.workload_writes.clear()
    world.edit(scheduling={"gang": "kueue", "queue": "other"}).settle()
    assert world.workload["spec"]["queueName"] == "other"
    assert world.workload_writes == ["delete", "create"]
    world.edit(scheduling={}).settle()
    assert (world.workload, list(world.pods)) == (None, ["sums-prepare-0"]), "it waits for nobody any more"


def test_generators_without_quota_are_not_started() -> None:
    world = running(roles={"generator": {"workers": 2}})
    world.edit(roles={"generator": {"workers": 4}}).settle()
    assert sum("generator" in name for name in world.pods) == 2
    world.edit(roles={"generator": {"workers": 1}}).settle()
    assert [delete.name for delete in world.deletes] == ["sums-generator-1"]


# --- what may go wrong -----------------------------------------------------------------------------------------------


def test_a_missing_workload_is_made_again_before_any_pod_ends() -> None:
    world = running()
    world.deletes.clear()
    world.workload = None
    world.reconcile()
    assert (world.workload is not None, world.deletes, world.phase) == (True, [], "Running")
    world.settle()
    assert (world.phase, [delete.name for delete in world.deletes]) == ("Suspending", ["sums-trainer-0"])


def test_pending_admission_checks_are_named_in_the_status() -> None:
    world = queued()
    world.kueue_says("QuotaReserved", True)
    world._workload_status(admissionChecks=[{"name": "nodes", "state": "Pending", "message": "asked for 2 nodes"}])
    world.settle()
    assert world.status["message"].endswith("waits for nodes (Pending) asked for 2 nodes")
    updates = [{"name": "trainer", "annotations": {"request": "r1"}, "nodeSelector": {"group": "g"}}]
    world._workload_status(admissionChecks=[{"name": "nodes", "state": "Ready", "podSetUpdates": updates}])
    world.admit()
    world.to_running()
    trainer, reward = world.pods["sums-trainer-0"], world.pods["sums-reward-0"]
    assert trainer["metadata"]["annotations"]["request"] == "r1"
    assert trainer["spec"]["nodeSelector"] == {"pool": "spot", "group": "g"}
    assert reward["spec"]["nodeSelector"] == {"pool": "spot"}


def test_a_run_waits_for_the_flavor_that_kueue_chose() -> None:
    world = queued()
    world.flavors.clear()
    world.admit()
    world.settle()
    assert (world.pods, world.status["reason"]) == ({}, "Queued")
    assert world.status["message"] == "ResourceFlavor spot, chosen by Kueue, does not exist"
    assert world.plan().requeue_seconds is not None
    world.flavors["spot"] = SPOT
    world.settle()
    assert list(world.pods) == ["sums-prepare-0"]


def test_a_refused_workload_is_reported_with_a_hint_to_install_kueue() -> None:
    world = World(job_body(**QUEUED), settings=KUEUE)
    name = "rlhfjob-sums-6f1c-42"
    said = "404 page not found"
    world.refusals["Workload", name] = Refusal("Workload", name, "404", said, world.now)
    world.reconcile()
    assert (world.workload, world.status["reason"]) == (None, "Queued"), "it is not tried again at once"
    hint = "is Kueue installed, and does it serve kueue.x-k8s.io/v1beta2?"
    assert world.status["message"] == f"Workload {name}: {said}; {hint}"
    world.pass_time(6)
    world.reconcile()
    assert world.workload is not None


def test_a_silent_kueue_is_reported_after_some_seconds() -> None:
    world = queued()
    assert world.status["reason"] == ""
    world.pass_time(6).settle()
    assert world.status["message"] == "queue gpus: Kueue has not responded yet; is it running?"


# --- what the watches say --------------------------------------------------------------------------------------------


def test_an_older_version_of_a_workload_is_ignored() -> None:
    world, known = queued(), Workloads()
    old = {**world.workload, "metadata": world.workload["metadata"] | {"resourceVersion": "5"}}
    assert known.put({**old, "metadata": old["metadata"] | {"resourceVersion": "7"}}) == ("rl", "sums")
    assert known.put(old) is None
    assert known.remove(old) == ("rl", "sums")
    assert known.put({**old, "metadata": old["metadata"] | {"resourceVersion": "9"}}) is None, "it is gone"
    assert known.of("6f1c-42").workload is None


def test_the_request_of_a_workload_does_not_depend_on_the_run() -> None:
    world = queued()
    asked = world.workload["metadata"]["annotations"]
    world.admit()
    world.to_running()
    world.workload = None
    world.reconcile()
    assert world.workload["metadata"]["annotations"] == asked
