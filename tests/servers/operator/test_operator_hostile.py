"""No job stops the operator, by extreme numbers or unforeseen errors."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from accepted_jobs import manifests
from aiohttp import web
from api_servers import serving
from hypothesis import HealthCheck, given, settings
from operator_world import SETTINGS, World, job_body

from rlhfspec.operator.deciding.reconcile import reconcile
from rlhfspec.operator.deciding.situation import MOST_AT_ONCE
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.looking.looks import Reconciler
from rlhfspec.operator.looking.views import job_view
from rlhfspec.operator.running import restarted

NUM_JOBS = int(os.environ.get("RLHFSPEC_HOSTILE_JOBS", "500"))  # 10,000 take a minute


def grown(workers: int, **changes: Any) -> World:
    return World(job_body(roles={"generator": {"workers": workers}}, **changes))


def test_a_job_of_many_pods_is_made_and_taken_down_some_at_a_time() -> None:
    world = grown(7 * MOST_AT_ONCE + 3)
    world.settle()
    world.end_pod("sums-prepare-0", 0, "prepared")
    while not (plan := world.reconcile()).is_quiet:
        assert sum(thing["kind"] == "Pod" for thing in plan.create) <= MOST_AT_ONCE
        assert plan.requeue_seconds is not None
    assert len([name for name in world.pods if "generator" in name]) == 7 * MOST_AT_ONCE + 3
    world.run_all()
    world.reconcile()
    world.delete_job()
    while world.pods:
        assert len((plan := world.reconcile()).delete) <= MOST_AT_ONCE
        assert plan.delete or world.is_gone or not world.pods
        world.end_those_asked()


@pytest.mark.parametrize("replicas", [None, {"min": 1, "max": 998}])
def test_a_job_of_more_pods_than_the_operator_allows_is_refused(replicas: Any) -> None:
    roles = {"generator": {"workers": 1, "replicas": replicas} if replicas else {"workers": 998}}
    world = World(job_body(roles=roles))
    world.settle()
    assert world.phase == "Failed"
    many = "998, which makes 1003 pods; the operator allows 1000 per job (jobs.maxWorkers of its chart)"
    assert world.healthy() == ("False", "BadConfig", f"spec.roles.generator.workers: {many}")
    assert not world.pods


def test_a_job_scaled_beyond_the_limit_keeps_its_pods_and_is_reported() -> None:
    world = grown(2)
    world.to_running()
    world.edit(roles={"generator": {"workers": 2000}})
    world.settle()
    assert world.phase == "Running"
    assert world.healthy()[1] == "BadConfig"
    assert len([name for name in world.pods if "generator" in name]) == 2


@pytest.mark.parametrize("said", ["1k", "1.0", "1e0", "2", 3])
def test_gpus_are_counted_in_every_notation_of_quantities(said: Any) -> None:
    world = World(job_body(roles={"generator": {"resources": {"limits": {"nvidia.com/gpu": said}}}}))
    world.settle()
    world.end_pod("sums-prepare-0", 0, "prepared")
    world.settle()
    assert world.status["gpus"] == {"1k": 1000, "1.0": 1, "1e0": 1, "2": 2, 3: 3}[said]


@settings(max_examples=NUM_JOBS, suppress_health_check=list(HealthCheck))
@given(manifests())
def test_every_job_that_an_api_server_takes_has_a_status(manifest: dict[str, Any]) -> None:
    body = job_body() | {"spec": manifest["spec"]}
    world = World(body)
    plan = reconcile(job_view(body), world.observed(), SETTINGS, world.now)
    status = plan.status
    for _ in range(3):
        if "phase" not in status or status["phase"] == "Failed":
            break
        body["status"] = status | {"internal": status.get("internal", {}) | {"prepared": True}}
        plan = reconcile(job_view(body), world.observed(), SETTINGS, world.now)
        json.dumps(plan.create)
        status = plan.status
    assert {"Healthy", "Failed"} <= {condition["type"] for condition in json.loads(json.dumps(status))["conditions"]}


async def test_a_job_that_cannot_be_decided_says_why_and_is_tried_again(tmp_path: Path) -> None:
    asked: list[tuple[str, str, Any]] = []

    async def take(request: web.Request) -> web.Response:
        asked.append((request.method, request.path, await request.json()))
        return web.json_response(job_body())

    def broken(*_: Any) -> Any:
        raise OverflowError("Python int too large to convert to C int")

    cache = Cache()
    cache.put_job(job_body())
    async with serving(take, tmp_path) as api:
        looked = await Reconciler(cache, api, SETTINGS, decide=broken).reconcile(("rl", "sums"))
    assert looked.requeue_seconds == pytest.approx(60.0)
    (_, path, patch), *events = asked
    event = next(event for _, _, event in events if event["type"] == "Warning")
    assert path.endswith("/rlhfjobs/sums/status")
    status = next(each["value"] for each in patch if each["path"] == "/status")
    said = "OverflowError: Python int too large to convert to C int"
    assert (status["phase"], status["reason"], status["message"]) == ("Pending", "OperatorError", said)
    assert [(c["type"], c["status"], c["reason"]) for c in status["conditions"]] == [
        ("Healthy", "False", "OperatorError")
    ]
    assert (event["reason"], event["message"]) == ("OperatorError", said)


@pytest.mark.parametrize(
    "memory",
    [
        {"generators": 10**12},
        {"number": 10**12, "state": "open", "prepared": True, "generators": 10**12, "opened": "2026-01-01T00:00:00Z"},
        {"no_such": "field", "purge": ["3a9d33b1"]},
    ],
)
def test_an_arbitrary_status_does_not_break_the_reconcile(memory: dict[str, Any]) -> None:
    """Users may write the status. Of an invalid job, only its pods are counted."""
    for changes in ({}, {"no_such": "field"}):
        body = job_body(**changes) | {"status": {"internal": memory}}
        status = reconcile(job_view(body), World(body).observed(), SETTINGS, World().now).status
        assert len(json.dumps(status)) < 10_000


@pytest.mark.parametrize("memory", [{"number": "x"}, {"workers": [1]}, {"opened": 7}, [1], "x"])
def test_a_status_of_wrong_types_is_that_jobs_trouble_alone(memory: Any) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        reconcile(job_view(job_body() | {"status": {"internal": memory}}), World().observed(), SETTINGS, World().now)


def test_restarts_of_impossible_worker_names_are_not_counted() -> None:
    cache = Cache()
    counts = {"trainer-0": 2, "nonsense": 1, "x-1": 3, "-": 4, "reward-": 5}
    cache.put_job(job_body() | {"status": {"restarts": {"byWorker": counts}}})
    assert [tuple(told) for told in restarted(cache)] == [("rl", "sums", "trainer", 0, 2)]


def test_an_orphaning_deletion_of_a_job_leaves_its_pods() -> None:
    """`kubectl delete --cascade=orphan`: the job remains until Kubernetes released the pods."""
    world = World()
    world.to_running()
    world.body["metadata"]["finalizers"] = ["orphan"]
    world.delete_job()
    assert world.reconcile().is_quiet
    world.body["metadata"]["finalizers"] = ["foregroundDeletion"]
    assert world.reconcile().delete


def test_a_status_with_run_number_0_starts_run_1() -> None:
    world = World()
    world.settle()
    world.body["status"] = {"internal": {"number": 0, "state": "open"}}
    world.now += timedelta(seconds=60)
    world.settle()
    assert world.body["status"]["run"]["number"] == 1


def test_a_condition_without_a_transition_time_is_repaired() -> None:
    world = World()
    world.settle()
    world.body["status"]["conditions"] = [{"type": "Healthy", "status": "False"}, {"type": "Ready", "status": "False"}]
    world.settle()
    assert all(each["lastTransitionTime"] for each in world.body["status"]["conditions"])
