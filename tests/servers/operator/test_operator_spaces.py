"""A job's objects in a namespace are made until complete. Real roles: e2e/test_operator_spaces."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from api_servers import serving
from coroutines import until

from rlhfspec.operator.shared import spaces
from rlhfspec.operator.shared.spaces import Spaces
from rlhfspec.stage.tasks import ended

KIT = [
    {"apiVersion": "v1", "kind": kind, "metadata": {"name": "it"}}
    for kind in ("ServiceAccount", "PersistentVolumeClaim")
]
WHERE = "/api/v1/namespaces/team"


class Server:
    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.answers: dict[str, int] = {}  # code by method

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked[f"{request.method} {request.path}"] += 1
        code = self.answers.get(request.method, 201)
        return web.json_response({"message": "because"} if code >= 400 else {}, status=code)


@asynccontextmanager
async def working(server: Server, folder: Path) -> AsyncIterator[Spaces]:
    async with serving(server.answer, folder) as api:
        found = Spaces(api, KIT)
        task = asyncio.create_task(found.work())
        try:
            yield found
        finally:
            assert not task.done()
            await ended(task)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spaces, "NAMESPACE_RETRY_SECONDS", 0.02)


CLAIM, ACCOUNT = f"POST {WHERE}/persistentvolumeclaims", f"PATCH {WHERE}/serviceaccounts/it"


async def test_refused_namespace_object_is_retried_until_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    server.answers["PATCH"] = 403
    async with working(server, tmp_path) as found:
        found.joins("team")
        await until(lambda: server.asked[ACCOUNT] >= 3)
        assert server.asked[CLAIM] == 0
        server.answers.clear()
        await until(lambda: server.asked[CLAIM] == 1)
        found.joins("other")
        await until(lambda: server.asked[CLAIM.replace("team", "other")] == 1)
        assert server.asked[CLAIM] == 1, "what is there is left alone"
    assert [record.message for record in caplog.records if "not ready" in record.message] == [
        "namespace team is not ready for jobs: ServiceAccount it: because"
    ]


async def test_a_claim_that_exists_already_is_no_error(tmp_path: Path) -> None:
    server = Server()
    server.answers["POST"] = 409
    async with working(server, tmp_path) as found:
        found.joins("team")
        await until(lambda: server.asked[CLAIM] == 1)
        found.joins("next")
        await until(lambda: server.asked[CLAIM.replace("team", "next")] == 1)
        assert server.asked[CLAIM] == 1


async def test_a_recreated_namespace_is_furnished_again(tmp_path: Path) -> None:
    server = Server()
    async with working(server, tmp_path) as found:
        found.joins("team")
        await until(lambda: server.asked[CLAIM] == 1)
        found.joins("team")
        await until(lambda: server.asked[CLAIM] == 2)
        found.leaves("team")
        found.joins("team")
        await until(lambda: server.asked[CLAIM] == 3)
