"""Access to the dashboard: streams per visitor, revoked rights, last words."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web
from api_servers import serving
from dashboards import Stream, served, visited, visiting, write_run

from rlhfspec.common.web import serve
from rlhfspec.dashboard import server as server_module
from rlhfspec.dashboard.access import Visitor, What
from rlhfspec.dashboard.jobs.cluster import ClusterSource, Servers, last_words_of, pod_of
from rlhfspec.dashboard.jobs.laptop import LaptopSource
from rlhfspec.dashboard.jobs.source import JobDetail, JobHead, JobKey, RunFolderInfo
from rlhfspec.dashboard.live.readers import EventStream, ServerSentEvent
from rlhfspec.dashboard.server import MOST_STREAMS_OF_ONE
from rlhfspec.stage.tasks import ended

JOB = "/api/jobs/laptop/run"
EVENTS = f"{JOB}/events"
SECRET = "ValueError: the answer of the user was 42"


class People:
    """Users of the API server: `a-1` and `a-2` are tokens of user a. `rights` may change."""

    is_local = False

    def __init__(self, **rights: tuple[What, ...]) -> None:
        self.rights = rights
        self.gone: set[str] = set()

    async def visitor(self, token: str) -> Visitor | None:
        name = token.partition("-")[0]
        return Visitor(name, token) if name in self.rights and token not in self.gone else None

    async def may(self, visitor: Visitor, namespace: str, what: What) -> bool:
        return what in self.rights[visitor.name]


class Failing(LaptopSource):
    words: Mapping[str, str] = {"run-reward-0": SECRET}

    async def job(self, key: JobKey) -> JobDetail:
        detail = await super().job(key)
        return JobDetail(head=detail.head, last_words=self.words)


async def ends(stream: Stream) -> None:
    async with asyncio.timeout(30):
        while not await stream.is_over():
            pass


async def test_one_visitor_never_takes_the_streams_of_another(tmp_path: Path) -> None:
    source = LaptopSource([write_run(tmp_path / "run")])
    async with served(source, People(a=("jobs",), b=("jobs",))) as (_, url), AsyncExitStack() as open_:
        one, two, other = [await open_.enter_async_context(visiting(token)) for token in ("a-1", "a-2", "b")]
        streams = [f"{url}/api/events", f"{url}{EVENTS}"]
        for number in range(MOST_STREAMS_OF_ONE - 1):
            await open_.enter_async_context(Stream((one, two)[number % 2], streams[number // 2 % 2]))
        async with Stream(one, streams[0]):
            for session in (one, two):
                for path in streams:
                    refused = await session.get(path)
                    told = f"a has {MOST_STREAMS_OF_ONE} pages of this dashboard open already: close one\n"
                    assert (refused.status, await refused.text()) == (429, told)
            for path in streams:
                await open_.enter_async_context(Stream(other, path))
        async with asyncio.timeout(30):  # that one is closed, as the server will see
            while (again := await one.get(streams[0])).status == 429:
                await asyncio.sleep(0.01)
        assert again.status == 200
        again.close()


async def test_reloading_a_page_does_not_use_up_the_streams_of_a_visitor(tmp_path: Path) -> None:
    """A closed stream frees its slot even without events."""
    dashboard = server_module.Dashboard(LaptopSource([write_run(tmp_path / "run")]), People(a=("jobs",)))
    port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(dashboard.app(), "127.0.0.1", 0, ready=port.set_result))
    url = f"http://127.0.0.1:{await port}/api/events"
    for _ in range(3 * MOST_STREAMS_OF_ONE):
        async with visiting("a") as session, Stream(session, url) as stream:
            await stream.next("jobs")
    await ended(task)


async def test_a_deleted_namespace_is_the_only_one_missing(tmp_path: Path) -> None:
    """Its rights went along, so that the API server refuses its list."""
    refused = {"gone"}

    async def answer(request: web.Request) -> web.Response:
        namespace = request.path.split("/")[-2]
        if namespace in refused:
            return web.json_response({"message": f"forbidden in {namespace}"}, status=403)
        items = [{"metadata": {"namespace": namespace, "name": "sums"}}]
        return web.json_response({"items": items, "metadata": {"resourceVersion": "1"}})

    async with serving(answer, tmp_path) as api:
        for namespaces in (["gone", "team"], ["team", "gone"]):
            source = ClusterSource(api, Servers(), namespaces=namespaces)
            async with served(source, People(a=("jobs",))) as (_, url), visiting("a") as session:
                assert [job["namespace"] for job in await (await session.get(f"{url}/api/jobs")).json()] == ["team"]
                assert (await session.get(f"{url}/api/jobs/team/sums/yaml")).status == 200
        refused.add("team")
        source = ClusterSource(api, Servers(), namespaces=["gone", "team"])
        async with served(source, People(a=("jobs",))) as (_, url), visiting("a") as session:
            assert (await session.get(f"{url}/api/jobs")).status == 503, "no list at all is no empty list"


async def test_all_visitors_together_have_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_STREAMS", 1)
    async with (
        visited(write_run(tmp_path / "run"), People(a=("jobs",), b=("jobs",)), "a") as (one, url),
        visiting("b") as other,
        Stream(one, f"{url}/api/events"),
    ):
        assert (await other.get(f"{url}/api/events")).status == 429


@pytest.mark.parametrize(("path", "lost"), [("/api/events", "token"), (EVENTS, "token"), (EVENTS, "right")])
async def test_a_visitor_who_loses_access_loses_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, lost: str
) -> None:
    monkeypatch.setattr(server_module, "KEEP_ALIVE_SECONDS", 0.05)
    people, run = People(a=("jobs",)), write_run(tmp_path / "run")
    async with visited(run, people, "a-1") as (session, url), Stream(session, f"{url}{path}") as stream:
        await stream.next("job", "jobs")
        if lost == "token":
            people.gone.add("a-1")
        else:
            people.rights["a"] = ()
        await ends(stream)


async def test_last_words_reach_only_those_who_may_read_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "KEEP_ALIVE_SECONDS", 0.05)
    people, source = People(reader=("jobs", "texts"), looker=("jobs",)), Failing([write_run(tmp_path / "run")])
    async with (
        served(source, people) as (dashboard, url),
        visiting("looker") as looking,
        visiting("reader") as reading,
        Stream(reading, f"{url}{EVENTS}") as read,
        looking.get(f"{url}{EVENTS}") as looked,
    ):
        assert (await read.next("last_words")).data == {"run-reward-0": SECRET}
        people.rights["reader"] = ("jobs",)
        [feed] = [await each.starting for each in dashboard.feeds._feeds.values()]
        while any(reader.hidden == () for reader in feed.events.readers):
            await asyncio.sleep(0.01)
        source.words = {"run-reward-0": "newer words"}
        feed.events.latest("mark", 1)
        told = await read.next("mark", "last_words")
        while told.name != "mark":
            told = await read.next("mark", "last_words")
            assert told.name == "mark", told
        whole = b""
        while b"event: mark" not in whole:
            whole += await looked.content.readline()
        assert b"event: job" in whole
        assert b"last_words" not in whole
        assert SECRET.encode() not in whole


async def test_access_is_checked_on_a_stream_that_is_never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue that is never empty never waits, so a time-out never fires."""
    monkeypatch.setattr(server_module, "KEEP_ALIVE_SECONDS", 0.05)
    events = EventStream()
    reader, written = events.reader(dict), []

    class Browser:
        async def write(self, data: bytes) -> None:
            written.append(data)
            reader.queue.put_nowait(ServerSentEvent("now", "1", "1"))
            await asyncio.sleep(0)

    async def still() -> None:
        raise aiohttp.web.HTTPForbidden

    dashboard = server_module.Dashboard.__new__(server_module.Dashboard)
    with pytest.raises(aiohttp.web.HTTPForbidden):
        async with asyncio.timeout(30):
            await dashboard._write_on(Browser(), reader, still)  # type: ignore[arg-type]
    assert len(written) > 2


async def test_a_quiet_stream_repeats_no_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "KEEP_ALIVE_SECONDS", 0.05)
    run, people = write_run(tmp_path / "run"), People(a=("jobs",))
    async with visited(run, people, "a") as (session, url), session.get(f"{url}/api/events") as answer:
        lines: list[bytes] = []
        while lines.count(b": still here\n") < 5:
            lines.append(await answer.content.readline())
        assert lines.count(b"event: jobs\n") == 1
        assert lines.count(b"retry: 1000\n") == 1


# ---- the job as it is written, and where its run lies ---------------------------------------------------------------


async def test_the_page_shows_the_yaml_and_the_run_folder_of_the_job(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    async with (
        visited(folder, People(a=("jobs",), b=()), "a") as (session, url),
        visiting("b") as stranger,
        Stream(session, f"{url}{EVENTS}") as stream,
    ):
        answer = await session.get(f"{url}{JOB}/yaml")
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert yaml.safe_load(await answer.text()) == yaml.safe_load((folder / "job.yaml").read_text())
        assert (await stranger.get(f"{url}{JOB}/yaml")).status == 403
        assert (await stream.next("job")).data["folder"] == {"path": str(folder), "place": "this machine", "fetch": ""}


class Pods:
    def __init__(self, job: dict[str, Any]) -> None:
        self.job = {"metadata": {"name": "sums", "namespace": "team", "uid": "u", "managedFields": [{}]}, **job}

    async def list(self, version: str, kind: str, namespace: str, **_: Any) -> AsyncIterator[dict[str, Any]]:
        if kind == "RLHFJob":
            yield self.job
            return
        ended = {"reason": "Error", "exitCode": 1, "message": f"\x1b[31mTraceback\n{SECRET}\n"}
        container = {"name": "worker", "state": {"terminated": ended}, "restartCount": 2}
        yield {"metadata": {"name": "sums-reward-0"}, "status": {"containerStatuses": [container]}}


@pytest.mark.parametrize(
    ("storage", "place"),
    [
        ({"claim": "mine"}, "claim mine"),
        ({}, "claim release"),
        ({"uri": "s3://bucket/team", "secret": "keys"}, "s3://bucket/team"),
    ],
)
async def test_a_run_in_a_cluster_shows_where_its_folder_is(storage: dict[str, str], place: str) -> None:
    job = {"spec": {"storage": storage}, "status": {"run": {"folder": "/storage/runs/sums-1"}}}
    source = ClusterSource(Pods(job), Servers(storage_claim="release"))  # type: ignore[arg-type]
    detail = await source.job(JobKey("team", "sums"))
    assert detail.folder == RunFolderInfo(
        path="/storage/runs/sums-1", place=place, fetch="kubectl rlhf get-run sums -n team"
    )
    assert SECRET not in repr((detail.pods, detail.head, detail.conditions))
    assert detail.last_words["sums-reward-0"].endswith(SECRET)
    assert "managedFields" not in (await source.manifest(JobKey("team", "sums")))["metadata"]
    assert isinstance(detail.head, JobHead)


def test_the_state_of_a_pod_omits_what_its_containers_wrote() -> None:
    ended = {"terminated": {"reason": "OOMKilled", "exitCode": 137, "message": SECRET}}
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    pod = {
        "metadata": {"name": "sums-reward-0", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "status": {
            "phase": "Running",
            "containerStatuses": [{"state": ended, "lastState": ended}, {"state": waiting, "ready": True}],
            "initContainerStatuses": [{"state": {"terminated": {"exitCode": 0, "message": "fetched"}}}],
        },
    }
    assert pod_of(pod).message == "OOMKilled, exit code 137 ImagePullBackOff: no such image"
    assert last_words_of(pod) == f"fetched {SECRET}"
