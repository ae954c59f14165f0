"""Pods that somebody else made in the name of a job count for nothing."""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer
from operator_world import SETTINGS, World

from rlhfspec.cluster import names
from rlhfspec.cluster.report import Report
from rlhfspec.operator.deciding.reconcile import FORGED_SECONDS, STALE_AT_MOST_SECONDS, reconcile
from rlhfspec.operator.deciding.situation import Delete, ReconcilePlan
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.looking.views import job_view
from rlhfspec.operator.reports import Reports
from rlhfspec.operator.shared.credentials import new_keys
from rlhfspec.operator.shared.release import proof_by

KEY = ("rl", "sums")
Json = dict[str, Any]


def cache_of(world: World) -> Cache:
    """A replica that has just begun to lead: it knows what stands in the status."""
    cache = Cache()
    cache.put_job(world.body)
    for number, pod in enumerate(world.pods.values()):
        cache.put_pod(copy.deepcopy(pod) | {"metadata": pod["metadata"] | {"resourceVersion": str(number + 1)}})
    return cache


def forge(world: World, role: str) -> None:
    """All is as the operator's own, but for its uid; the proof is of another pod."""
    pod = copy.deepcopy(world.pods.get(f"sums-{role}-0") or world.pods["sums-prepare-0"])
    labels = names.labels_of("sums", role, 0) | {names.RUN: world.run_uid}
    pod["metadata"] |= {"name": f"sums-{role}-0", "uid": "forged", "labels": labels}
    world.pods[f"sums-{role}-0"] = pod


def decided(world: World) -> ReconcilePlan:
    return reconcile(job_view(world.body), cache_of(world).observed(KEY), SETTINGS, world.now)


@pytest.mark.parametrize("is_running", [False, True])
def test_a_forged_trainer_completes_no_job_and_is_removed(is_running: bool) -> None:
    world = World()
    world.to_running() if is_running else world.settle()
    world.run_all()
    world.settle()
    phase = world.phase
    forge(world, "trainer")
    world.end_pod("sums-trainer-0", 0, "completed: step 10")
    world.now += timedelta(seconds=STALE_AT_MOST_SECONDS)
    plan = decided(world)
    assert plan.status["phase"] == phase == ("Running" if is_running else "Preparing")
    assert Delete("Pod", "sums-trainer-0", FORGED_SECONDS, "forged") in plan.delete


def test_a_pod_without_a_record_is_tolerated_for_a_moment() -> None:
    world = World()
    world.settle()
    forge(world, "prepare")
    plan = decided(world)
    assert plan.delete == ()
    assert plan.requeue_seconds <= STALE_AT_MOST_SECONDS


async def test_a_forged_control_reports_nothing() -> None:
    world = World()
    world.to_running()

    async def answer_to(pod: str) -> int:
        async def review(token: str, audience: str) -> Json:
            extra = {"pod-name": ["sums-control-0"], "pod-uid": [pod]}
            named = {f"authentication.kubernetes.io/{name}": value for name, value in extra.items()}
            user = {"username": f"system:serviceaccount:rl:{names.SERVICE_ACCOUNT}", "extra": named}
            return {"authenticated": True, "audiences": [audience], "user": user}

        reports = Reports(cache_of(world), review, lambda key: None, is_acting=lambda: True)
        async with TestClient(TestServer(reports.app())) as client:
            body = Report(run=world.run_uid, step=10).model_dump_json()
            headers = {"Authorization": "Bearer good"}
            async with client.post(names.report_path(*KEY), data=body, headers=headers) as answer:
                return answer.status

    assert await answer_to(world.pods["sums-control-0"]["metadata"]["uid"]) == 204
    forge(world, "control")
    assert await answer_to("forged") == 403


def test_a_new_leader_knows_a_pod_that_the_last_one_made_and_did_not_record() -> None:
    """It was killed between the creation and its next write of the status."""
    world = World()
    world.to_running()
    world.end_pod("sums-reward-0", 1, "boom")
    world.settle()
    world.pass_time(60)
    plan = world.reconcile()  # removes it
    while "sums-reward-0" not in {thing["metadata"]["name"] for thing in plan.create}:
        plan = world.reconcile()
    pod = world.pods["sums-reward-0"]
    assert pod["metadata"]["uid"] != world.status["internal"]["made"]["reward-0"]
    world.pass_time(STALE_AT_MOST_SECONDS)
    again = decided(world)
    assert (again.delete, again.create) == ((), ())
    assert again.status["internal"]["made"]["reward-0"] == pod["metadata"]["uid"]


def test_the_proof_of_one_pod_is_not_valid_for_another() -> None:
    world = World()
    world.to_running()
    copied = world.pods["sums-trainer-0"]["metadata"]["annotations"][names.PROOF]
    forge(world, "trainer")
    assert world.pods["sums-trainer-0"]["metadata"]["annotations"][names.PROOF] == copied
    world.end_pod("sums-trainer-0", 0, "completed: step 10")
    assert decided(world).status["phase"] == "Running"


def test_proofs_depend_only_on_the_keys_of_the_release() -> None:
    keys = new_keys()
    proofs = {proof_by(each)("run", "trainer-0", last) for each in (keys, new_keys()) for last in ("", "p1")}
    assert len(proofs) == 4
    assert proof_by(keys)("run", "trainer-0", "") == proof_by(keys)("run", "trainer-0", "")
