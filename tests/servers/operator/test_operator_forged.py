"""Pods that somebody else made in the name of a job count for nothing."""

from __future__ import annotations

import copy
import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from api_servers import serving
from operator_world import SETTINGS, World

from rlhfspec.cluster import names
from rlhfspec.cluster.report import Report
from rlhfspec.operator.deciding.observed import Observed
from rlhfspec.operator.deciding.reconcile import FORGED_SECONDS, STALE_AT_MOST_SECONDS, reconcile
from rlhfspec.operator.deciding.situation import Delete, ReconcilePlan
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.looking.looks import Reconciler
from rlhfspec.operator.looking.views import job_view
from rlhfspec.operator.reports import Reports

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
    """Everything is as the operator's own, but for its uid."""
    like = world.pods.get(f"sums-{role}-0") or world.pods["sums-prepare-0"]
    pod = copy.deepcopy(like)
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


def test_a_pod_whose_record_may_still_be_on_its_way_is_left_for_a_moment() -> None:
    world = World()
    world.settle()
    forge(world, "prepare")
    plan = decided(world)
    assert plan.delete == ()
    assert plan.requeue_seconds is not None
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


class Server:
    """API server with one pod at most, which loses the answer to its first creation."""

    def __init__(self, world: World, pod: Json | None = None) -> None:
        self.world, self.pod, self.loses = world, pod, pod is None
        self.status: Json = {}

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        if request.path.endswith("/rlhfjobs/sums/status"):
            [self.status] = [each["value"] for each in body if each["path"] == "/status"]
            metadata = self.world.body["metadata"]
            metadata["resourceVersion"] = str(int(metadata["resourceVersion"]) + 1)
            return web.json_response(self.world.body | {"status": json.loads(json.dumps(self.status))})
        if "/pods" in request.path and request.method == "POST":
            if self.pod is not None:
                return web.json_response({"reason": "AlreadyExists", "message": "is there"}, status=409)
            more = {"uid": "p1", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
            self.pod = body | {"metadata": body["metadata"] | more, "status": {"phase": "Pending"}}
            return web.json_response({"message": "later"}, status=504)
        if "/pods/" in request.path and request.method == "PATCH":
            return web.json_response(self.pod)
        return web.json_response(body)


@pytest.mark.parametrize("is_forged", [False, True])
async def test_a_pod_is_ours_also_where_the_answer_to_its_creation_was_lost(tmp_path: Path, is_forged: bool) -> None:
    world, cache, pod = World(), Cache(), None
    cache.put_job(world.body)
    if is_forged:
        pod = pod_made_before(world)
    server = Server(world, pod)
    async with serving(server.answer, tmp_path) as api:
        reconciler = Reconciler(cache, api, SETTINGS)
        first = await reconciler.reconcile(KEY)
        assert (first.requeue_seconds == 0.0) is not is_forged, "its uid goes into the status at once"
        await reconciler.reconcile(KEY)
    [seen] = cache.pods(KEY)
    assert seen.is_ours is not is_forged
    assert server.status["internal"].get("made", {}) == ({} if is_forged else {"prepare-0": "p1"})


def pod_made_before(world: World) -> Json:
    """The pod of prepare that somebody made before the operator did."""
    plan = reconcile(job_view(world.body), Observed(), SETTINGS, world.now)
    [pod] = [thing for thing in plan.create if thing["kind"] == "Pod"]
    more = {"uid": "forged", "resourceVersion": "1", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return pod | {"metadata": pod["metadata"] | more, "status": {"phase": "Pending"}}
