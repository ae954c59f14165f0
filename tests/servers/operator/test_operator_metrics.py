"""The operator's metrics while it reconciles, is refused, and replaces a pod; see also e2e/test_operator.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from api_servers import kubeconfig
from operator_world import SETTINGS, job_body
from scraping import Scrape, family, named_anywhere, names_of, samples_of, values_of

from rlhfspec.operator.deciding.memory import text_of
from rlhfspec.operator.lease import Lease
from rlhfspec.operator.running import Operator, ReplicaPlace
from rlhfspec.operator.web import health_app

KEY = ("rl", "sums")
PATIENCE_SECONDS = 60.0


class Taking:
    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.refuses = False

    async def take(self, request: web.Request) -> web.Response:
        if self.refuses:
            return web.json_response({"kind": "Status", "message": "conflict"}, status=409)
        path, body = request.path.removesuffix("/status"), await request.json()
        kept = self.kept.setdefault(path, {"metadata": {"uid": f"uid-{len(self.kept)}", "resourceVersion": "1"}})
        if isinstance(body, list):  # a status, whole
            kept["status"] = body[-1]["value"]
        else:
            _merge(kept, body)
        kept["metadata"]["resourceVersion"] = str(int(kept["metadata"]["resourceVersion"]) + 1)
        kept["metadata"].setdefault("creationTimestamp", text_of(datetime.now(UTC)))
        kept.setdefault("status", {})
        return web.json_response(kept)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [thing for thing in self.kept.values() if thing.get("kind") == kind]


def _merge(into: dict[str, Any], what: dict[str, Any]) -> None:
    for key, value in what.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


class Watched:
    def __init__(self, operator: Operator, taking: Taking, session: ClientSession, url: str) -> None:
        self.operator, self.taking = operator, taking
        self._session, self._url = session, url

    async def metrics(self) -> Scrape:
        async with self._session.get(self._url) as answer:
            return samples_of(await answer.text(), {"pod": "rlhf-operator-a"})

    async def until(self, holds: Callable[[Scrape], Any], what: str) -> Scrape:
        end = time.monotonic() + PATIENCE_SECONDS
        while not holds(scrape := await self.metrics()):
            assert time.monotonic() < end, f"never: {what}: {scrape}"
            await asyncio.sleep(0.02)
        return scrape

    def ends(self, pod: dict[str, Any], code: int) -> None:
        ended = {
            "exitCode": code,
            "reason": "Error",
            "message": "no such host",
            "finishedAt": text_of(datetime.now(UTC)),
        }
        pod["status"] = {"phase": "Failed", "containerStatuses": [{"name": "worker", "state": {"terminated": ended}}]}
        pod["metadata"]["resourceVersion"] = str(int(pod["metadata"]["resourceVersion"]) + 1)
        self.operator._cache.put_pod(pod)
        self.operator._tell(KEY)


@asynccontextmanager
async def acting(folder: Path, patch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    taking = Taking()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", taking.take)
    patch.setattr(Lease, "is_held", property(lambda lease: True))

    async with TestServer(app) as server, ClientSession() as session:
        patch.setenv("KUBECONFIG", kubeconfig(folder, {"server": str(server.make_url("/"))}))
        operator = Operator(SETTINGS.model_copy(update={"job_namespaces": ("rl",)}), ReplicaPlace(None), ())
        operator._begin()
        async with operator._api, TestServer(health_app(operator._metrics, operator._problem)) as health:
            working = asyncio.create_task(operator._queue.work())
            try:
                yield Watched(operator, taking, session, f"http://127.0.0.1:{health.port}/metrics")
            finally:
                working.cancel()


async def test_actions_are_counted_and_every_metric_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with acting(tmp_path, monkeypatch) as watched:
        taking, cache = watched.taking, watched.operator._cache
        body = job_body()
        taking.kept["/apis/rlhfspec.io/v1alpha1/namespaces/rl/rlhfjobs/sums"] = body
        cache.put_job(body)
        watched.operator._tell(KEY)
        first = await watched.until(
            lambda found: values_of(found, "rlhfspec_restarts_total", stage="prepare"), "the first pod is made"
        )
        assert values_of(first, "rlhfspec_operator_leader") == [1.0]
        assert values_of(first, "rlhfspec_operator_jobs") == [1.0]
        assert values_of(first, "rlhfspec_operator_api_writes_total", verb="create", kind="Pod") == [1.0]
        whose = {"namespace": "rl", "rlhfjob": "sums", "stage": "prepare", "worker": "0"}
        assert values_of(first, "rlhfspec_restarts_total", **whose) == [0.0], "said before the first one"

        [pod] = taking.of_kind("Pod")
        taking.refuses = True
        watched.ends(pod, 75)
        await watched.until(
            lambda found: values_of(found, "rlhfspec_operator_reconcile_failures_total") >= [1.0], "a look fails"
        )
        taking.refuses = False
        last = await watched.until(
            lambda found: values_of(found, "rlhfspec_restarts_total", **whose) == [1.0], "it is counted"
        )
        wanted = {name for name in named_anywhere() if name.startswith("rlhfspec_operator_")}
        served = names_of([last])
        assert wanted <= served, sorted(wanted - served)
        assert set(map(family, served)) == set(map(family, wanted)) | {"rlhfspec_restarts"}, "all is documented"


async def test_a_standby_operator_counts_no_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with acting(tmp_path, monkeypatch) as watched:
        watched.operator._cache.put_job(job_body() | {"status": {"restarts": {"byWorker": {"reward-0": 2}}}})
        assert values_of(await watched.metrics(), "rlhfspec_restarts_total", worker="0") == [2.0]
        monkeypatch.setattr(Lease, "is_held", property(lambda lease: False))
        assert values_of(await watched.metrics(), "rlhfspec_restarts_total") == []
