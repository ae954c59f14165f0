"""Namespaces are watched independently."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from api_servers import serving
from coroutines import until
from operator_world import job_body

from rlhfspec.errors import ClusterUnavailable
from rlhfspec.operator.looking import watching
from rlhfspec.operator.looking.cache import Cache
from rlhfspec.operator.looking.watching import Informers

KEY, OTHER = ("rl", "sums"), ("team", "sums")


class Cluster:
    def __init__(self) -> None:
        self.version = 10
        self.jobs = {KEY: job_body(), OTHER: self.changed(job_body(), namespace="team", uid="other")}
        self.forbidden: set[str] = set()
        self.asked: Counter[tuple[str, str]] = Counter()
        self.labelled = {"rl": "1"}  # uids of namespaces with the label
        self._watches: list[tuple[str, asyncio.Queue[Any]]] = []

    def changed(self, body: dict[str, Any], **metadata: str) -> dict[str, Any]:
        self.version += 1
        body = copy.deepcopy(body)
        body["metadata"] |= {"resourceVersion": str(self.version), **metadata}
        return body

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/api/v1/namespaces":
            return await self._answer_namespaces(request)
        _, _, _, namespace, kind = request.path.rsplit("/", 4)
        is_watch = "watch" in request.query
        self.asked[namespace, "watch" if is_watch else "list"] += kind == "rlhfjobs"
        if namespace in self.forbidden:
            return web.json_response({"message": f"forbidden in {namespace}"}, status=403)
        if is_watch:
            return await self._watch(request, namespace if kind == "rlhfjobs" else "")
        items = [job for key, job in self.jobs.items() if key[0] == namespace] if kind == "rlhfjobs" else []
        return web.json_response({"items": items, "metadata": {"resourceVersion": str(self.version)}})

    async def _answer_namespaces(self, request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] == "jobs=here"
        if "watch" in request.query:
            return await self._watch(request, "namespaces")
        metadata = {"resourceVersion": str(self.version)}
        return web.json_response({"items": [self.namespace(name) for name in self.labelled], "metadata": metadata})

    def namespace(self, name: str, uid: str = "") -> dict[str, Any]:
        return {"metadata": {"name": name, "uid": uid or self.labelled[name], "resourceVersion": str(self.version)}}

    async def _watch(self, request: web.Request, namespace: str) -> web.StreamResponse:
        response, changes = web.StreamResponse(), asyncio.Queue[Any]()
        await response.prepare(request)
        self._watches.append((namespace, changes))
        while (change := await changes.get()) is not None:
            await response.write(json.dumps(change).encode() + b"\n")
        return response

    def tell(self, namespace: str, change: Any) -> None:
        for name, changes in self._watches:
            if name == namespace:
                changes.put_nowait(change)

    def end_watches(self) -> None:
        for _, changes in self._watches:
            changes.put_nowait(None)
        self._watches.clear()


@asynccontextmanager
async def watched(cluster: Cluster, folder: Path, label: str = "") -> AsyncIterator[tuple[Informers, Cache]]:
    cache, told = Cache(), list[Any]()
    found = Informers(cache, [] if label else ["rl", "team"], told.append, label=label)
    async with serving(cluster.answer, folder) as api:
        task = asyncio.create_task(found.run(api))
        try:
            yield found, cache
        finally:
            assert not task.done(), "whatever happened, it watches"
            task.cancel()
            cluster.end_watches()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "FIRST_WAIT_SECONDS", 0.02)
    monkeypatch.setattr(watching, "LONGEST_WAIT_SECONDS", 0.1)


async def test_a_forbidden_namespace_does_not_affect_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.forbidden.add("team")
    with caplog.at_level(logging.INFO):
        async with watched(cluster, tmp_path) as (found, cache):
            await until(lambda: cluster.asked["team", "list"] >= 3)
            assert cache.jobs() == [KEY]
            assert found.problems()["rl"] == ""
            assert found.problems()["team"].endswith("forbidden in team")
            cluster.tell("rl", {"type": "MODIFIED", "object": cluster.changed(cluster.jobs[KEY], generation=2)})
            await until(lambda: cache.job(KEY).generation == 2)
            cluster.forbidden.clear()
            await until(lambda: OTHER in cache.jobs())
            await until(lambda: found.problems() == {"rl": "", "team": ""})
    said = [record.message for record in caplog.records if "RLHFJobs of team" in record.message]
    assert len(said) == 2, "once that it is not, once that it is again"


async def test_a_job_deleted_while_a_watch_was_broken_is_removed(tmp_path: Path) -> None:
    cluster = Cluster()
    async with watched(cluster, tmp_path) as (_, cache):
        await until(lambda: cluster.asked["rl", "watch"] == 1 and cluster.asked["team", "watch"] == 1)
        job = cluster.jobs.pop(KEY)
        cluster.tell("rl", {"type": "ERROR", "object": {"code": 410, "message": "too old resource version"}})
        await until(lambda: cache.jobs() == [OTHER])
        assert cluster.asked["team", "list"] == 1
        cluster.tell("team", {"type": "DELETED", "object": cluster.changed(cluster.jobs[OTHER])})
        await until(lambda: cache.jobs() == [])
        assert job["metadata"]["uid"]


async def test_a_watch_that_the_server_ends_resumes_without_a_list(tmp_path: Path) -> None:
    cluster = Cluster()
    async with watched(cluster, tmp_path) as (_, cache):
        await until(lambda: cluster.asked["rl", "watch"] == 1)
        cluster.end_watches()
        await until(lambda: cluster.asked["rl", "watch"] == 2)
        cluster.tell("rl", {"type": "MODIFIED", "object": cluster.changed(cluster.jobs[KEY], generation=3)})
        await until(lambda: cache.job(KEY).generation == 3)
        assert cluster.asked["rl", "list"] == 1


async def test_a_huge_object_and_a_malformed_one_do_not_break_the_watch(tmp_path: Path) -> None:
    cluster = Cluster()
    async with watched(cluster, tmp_path) as (_, cache):
        await until(lambda: cluster.asked["rl", "watch"] == 1)
        cluster.tell("rl", {"type": "MODIFIED", "object": {"metadata": {"resourceVersion": "11", "name": "?"}}})
        large = cluster.changed(cluster.jobs[KEY], generation=4)
        large["metadata"]["annotations"] = {"large": "x" * 1_200_000}
        cluster.tell("rl", {"type": "MODIFIED", "object": large})
        await until(lambda: cache.job(KEY).generation == 4)


async def test_namespaces_come_and_go_with_their_label(tmp_path: Path) -> None:
    cluster = Cluster()
    async with watched(cluster, tmp_path, label="jobs=here") as (found, cache):
        await until(lambda: cache.jobs() == [KEY])
        assert found.problems() == {"": "", "rl": ""}
        cluster.tell("namespaces", {"type": "ADDED", "object": cluster.namespace("team", "2")})
        await until(lambda: set(cache.jobs()) == {KEY, OTHER})
        cluster.tell("namespaces", {"type": "DELETED", "object": cluster.namespace("rl")})
        await until(lambda: cache.jobs() == [OTHER])
        assert set(found.problems()) == {"", "team"}
        cluster.tell("namespaces", {"type": "ADDED", "object": cluster.namespace("rl")})
        await until(lambda: set(cache.jobs()) == {KEY, OTHER})


async def test_a_namespace_that_lost_its_label_while_nobody_watched_is_left(tmp_path: Path) -> None:
    cluster = Cluster()
    cluster.labelled["team"] = "2"
    async with watched(cluster, tmp_path, label="jobs=here") as (_, cache):
        await until(lambda: set(cache.jobs()) == {KEY, OTHER})
        del cluster.labelled["rl"]
        cluster.tell("namespaces", {"type": "ERROR", "object": {"code": 410, "message": "too old"}})
        await until(lambda: cache.jobs() == [OTHER])
        cluster.labelled = {"team": "3"}  # deleted and made again
        cluster.tell("namespaces", {"type": "ERROR", "object": {"code": 410, "message": "too old"}})
        await until(lambda: cluster.asked["team", "list"] == 1)
        assert cache.jobs() == [OTHER]


def test_a_namespace_is_known_only_once_everything_in_it_was_listed() -> None:
    looks = Informers(Cache(), ("team", "other"), lambda key: None)
    assert looks.watched() == set(), "what is not known to be open is not yet known to be over"
    for source in looks._sources:
        assert looks.watched() == set()
        looks._is("team", source, None)
    assert looks.watched() == {"team"}
    looks._is("team", looks._sources[0], ClusterUnavailable("list", "Forbidden"))
    assert looks.watched() == set()
