"""The report endpoint with a fake clock: report rates and token reviews; see also e2e/test_operator.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from operator_world import World

from rlhfspec.cluster import names
from rlhfspec.cluster.report import Report
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.reports import KNOWN_SECONDS, LEAST_SECONDS, MOST_KNOWN, NOT_ASKED_SECONDS, Reports

PATH = names.report_path("rl", "sums")


class Endpoint:
    def __init__(self) -> None:
        self.now = 0.0
        self.asked: Counter[str] = Counter()
        world, cache = World(), Cache()
        world.to_starting()
        cache.put_job(world.body)
        for number, pod in enumerate(world.pods.values()):
            pod["metadata"]["resourceVersion"] = str(number + 1)
            cache.put_pod(pod)
        self.control = world.view("sums-control-0")
        self.body = Report(run=world.run_uid, step=3, total_steps=10).model_dump_json()
        self.reports = Reports(cache, self._review, lambda key: None, is_acting=lambda: True, now=lambda: self.now)

    async def _review(self, token: str, audience: str) -> dict[str, Any]:
        self.asked[token] += 1
        if token != "good":
            return {"authenticated": False}
        extra = {"pod-name": [self.control.name], "pod-uid": [self.control.uid]}
        named = {f"authentication.kubernetes.io/{name}": value for name, value in extra.items()}
        user = {"username": f"system:serviceaccount:rl:{names.SERVICE_ACCOUNT}", "extra": named}
        return {"authenticated": True, "audiences": [audience], "user": user}


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Endpoint, Callable[[str], Awaitable[int]]]]:
    endpoint = Endpoint()
    async with TestClient(TestServer(endpoint.reports.app())) as client:

        async def post(token: str) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            async with client.post(PATH, data=endpoint.body, headers=headers) as answer:
                return answer.status

        yield endpoint, post


async def test_reports_of_a_job_are_rate_limited() -> None:
    async with served() as (endpoint, post):
        assert [await post("good"), await post("good")] == [204, 429]
        endpoint.now += LEAST_SECONDS
        assert await post("good") == 204


async def test_the_review_of_a_token_is_cached_for_a_while() -> None:
    async with served() as (endpoint, post):
        for _ in range(3):
            await post("good")
            assert await post("bad") == 401
        assert endpoint.asked == {"good": 1, "bad": 1}
        endpoint.now = NOT_ASKED_SECONDS
        await post("good")
        await post("bad")
        assert endpoint.asked == {"good": 1, "bad": 2}
        endpoint.now = KNOWN_SECONDS
        assert await post("good") == 204
        assert endpoint.asked["good"] == 2


async def test_only_a_bounded_number_of_tokens_is_remembered() -> None:
    async with served() as (endpoint, _):
        for number in range(MOST_KNOWN + 5):
            await endpoint.reports._caller(f"bad-{number}")
        assert len(endpoint.reports._callers) == MOST_KNOWN
