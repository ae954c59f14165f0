"""Sidecars from webhooks neither delay nor fail a job: only the worker counts."""

from typing import Any

import pytest
from operator_world import World, job_body, running

from rlhfspec.operator.deciding.runs import STOP_SECONDS
from rlhfspec.operator.looking.views import pod_view

ENDED = {"exitCode": 0, "reason": "Completed", "message": "completed: step 10"}


def with_classic(world: World, name: str) -> None:
    """Add a container that never ends, as some service meshes do."""
    status = world.pods[name]["status"]
    status["phase"] = "Running"
    beside = {"name": "mesh", "ready": True, "state": {"running": {}}}
    status["containerStatuses"] = [beside, *status["containerStatuses"]]


def with_native(world: World, name: str, state: dict[str, Any]) -> None:
    """Add a native sidecar, which ends after the worker."""
    pod = world.pods[name]
    pod["spec"]["initContainers"] = [{"name": "mesh", "restartPolicy": "Always"}]
    pod["status"]["initContainerStatuses"] = [{"name": "mesh", "state": state}]


@pytest.mark.parametrize("native", [False, True])
def test_a_job_with_sidecars_trains_to_its_end(native: bool) -> None:
    world = World()
    world.settle()
    world.run_all().settle()

    def end(name: str, code: int, message: str) -> None:
        world.end_pod(name, code, message)
        with_native(world, name, {"terminated": {"exitCode": 137}}) if native else with_classic(world, name)

    end("sums-prepare-0", 0, "prepared")
    world.settle()
    assert world.phase == "Starting"
    world.run_all().settle()
    assert world.phase == "Running"
    end("sums-reward-0", 1, "boom")
    world.settle()
    assert world.status["internal"]["workers"]["reward-0"]["message"].startswith("ended with exit code 1;")
    world.pass_time(60).wind_down()
    world.run_all().settle()
    end("sums-trainer-0", 0, "completed: step 10")
    world.wind_down()
    assert (world.phase, world.status["message"]) == ("Succeeded", "completed: step 10")
    assert world.status["restarts"]["total"] == 1
    waited_for = [each.grace_seconds for each in world.deletes if each.name == "sums-trainer-0"]
    assert waited_for == ([] if native else [STOP_SECONDS]), "no checkpoint is to be written any more"
    running = [name for name, pod in world.pods.items() if pod["status"]["phase"] == "Running"]
    assert running == [], "a pod whose worker ended is taken down, or its sidecar would run for ever"


@pytest.mark.parametrize("native", [False, True])
def test_the_pods_of_a_job_that_ended_keep_their_logs(native: bool) -> None:
    """The kubelet reports the end of a container a moment before the end of its pod, and ends native sidecars."""
    for role, code, message in (("trainer", 0, "completed: step 10"), ("reward", 78, "exact: boom")):
        world = running()
        world.end_pod(f"sums-{role}-0", code, message)
        world.pods[f"sums-{role}-0"]["status"]["phase"] = "Running"
        if native:
            with_native(world, f"sums-{role}-0", {"running": {}})
        world.wind_down()
        assert world.phase == ("Failed" if code else "Succeeded")
        assert f"sums-{role}-0" not in {delete.name for delete in world.deletes}


def view(world: World, **status: Any) -> Any:
    pod = world.pods["sums-prepare-0"]
    pod["status"] = status
    return pod_view(pod)


def test_an_evicted_pod_failed_though_its_worker_exited_with_0() -> None:
    """An evicted worker exits with 0, which is not its own end."""
    world = World()
    world.settle()
    containers = [{"name": "worker", "state": {"terminated": ENDED}}]
    assert view(world, phase="Running", containerStatuses=containers).phase == "Succeeded"
    assert view(world, phase="Failed", containerStatuses=containers).phase == "Succeeded", "a sidecar failed"
    evicted = view(world, phase="Failed", reason="Evicted", containerStatuses=containers)
    assert (evicted.phase, evicted.why.reason) == ("Failed", "Evicted")


def test_the_readiness_of_a_worker_ignores_its_sidecar() -> None:
    world = World(job_body())
    world.settle()
    not_ready = [world.condition("Ready", False)]
    containers = [
        {"name": "mesh", "ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}},
        {"name": "worker", "ready": True, "state": {"running": {}}},
    ]
    found = view(world, phase="Running", conditions=not_ready, containerStatuses=containers)
    assert (found.ready, found.waiting) == (True, None)


def test_an_init_container_that_fails_is_why_the_worker_does_not_run() -> None:
    world = World()
    world.settle()
    waits = {"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}
    failed = {"name": "fetch", "state": {"terminated": {"exitCode": 3, "message": "no such bucket"}}}
    found = view(world, phase="Failed", containerStatuses=[waits], initContainerStatuses=[failed])
    assert (found.phase, found.terminated.message) == ("Failed", "no such bucket")
