"""The dashboard over HTTP: finished and live runs, access, and hostile texts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shutil
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from coroutines import until
from dashboards import (
    HOSTILE,
    TOKEN,
    UID,
    LiveRun,
    Stream,
    beat,
    load,
    many_snapshots,
    moved,
    report,
    served,
    snapshot,
    visited,
    visiting,
    write_run,
)  # fmt: skip
from example_records import example_evaluation
from runs import command
from shared_servers import SharedServers
from stays import moved_there_and_back

from rlhfspec.dashboard import server as server_module
from rlhfspec.dashboard.jobs.folder import NewLines, RunReader, life_content
from rlhfspec.dashboard.jobs.laptop import LaptopSource
from rlhfspec.dashboard.jobs.source import Address, JobKey
from rlhfspec.dashboard.live.feed import Feeds
from rlhfspec.dashboard.live.hearing import Hearing
from rlhfspec.dashboard.live.readers import MOST_UNREAD, EventStream
from rlhfspec.dashboard.server import STATIC
from rlhfspec.errors import InvalidRequest, StorageError
from rlhfspec.messages.access.rights import inbox_of
from rlhfspec.messages.records import EvaluationReport, Record
from rlhfspec.messages.records.evaluations import Evaluation
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.messages.servers.credentials.certificates import servers_tls
from rlhfspec.messages.transport.jetstream.proof import NatsProof
from rlhfspec.messages.transport.nats import NatsTransport
from rlhfspec.runs.folder.moves import MovesFile
from rlhfspec.runs.live.live import SampleHead, Window
from rlhfspec.runs.view.learning_signs import DISTINCT, warning_of
from rlhfspec.runs.view.waterfall import LEGEND
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.tasks import ended

JOB = "/api/jobs/laptop/run"
EVENTS = f"{JOB}/events"


# ---- a finished run -------------------------------------------------------------------------------------------------


async def test_a_finished_run_is_listed_with_its_last_numbers(tmp_path: Path) -> None:
    async with visited(write_run(tmp_path / "run")) as (session, url):
        [job] = await (await session.get(f"{url}/api/jobs")).json()
        assert (job["name"], job["phase"], job["step"], job["total_steps"]) == ("run", "Succeeded", 3, 3)
        assert job["reward"] == 1.0
        assert job["message"] == "all steps are trained"


async def test_a_new_browser_gets_the_whole_curve(tmp_path: Path) -> None:
    async with visited(write_run(tmp_path / "run")) as (session, url), Stream(session, f"{url}{EVENTS}") as stream:
        whole = (await stream.next("whole")).data
        assert [row[whole["columns"].index("step")] for row in whole["rows"]] == [1, 2, 3]
        assert [row[whole["columns"].index("kl")] for row in whole["rows"]] == [0.001, 0.002, 0.003]
        job = (await stream.next("job")).data
        assert not job["is_live"]
        assert job["problems"] == []


def evaluated(step: int, different: float) -> Evaluation:
    return dataclasses.replace(example_evaluation(step=step), num_samples=120, different_answers=different)


async def test_a_run_that_learns_nothing_gets_a_warning(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    lines = [
        dataclasses.replace(
            example_step(step=step), num_prompts=8, learning={DISTINCT: 0.25}, equal_reward_groups=equal
        )
        for step, equal in enumerate((7, 8, 8, 8), 1)
    ]
    for number in (3, 4):  # of the steps, as the run goes on
        (folder / "steps.jsonl").write_text("".join(line.to_line() for line in lines[:number]))
        async with visited(folder) as (session, url), Stream(session, f"{url}{EVENTS}") as stream:
            whole = (await stream.next("whole")).data
            found = dict(zip(whole["columns"], whole["rows"][-1], strict=True))
            assert (found["equal_groups"], found["distinct"], found["prompts"]) == (8, 0.25, 8)
            assert (await stream.next("job")).data["warning"] == warning_of(lines[:number])
    assert warning_of(lines).startswith("rewards were equal in every group")


async def test_a_policy_that_collapses_is_warned_of(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    runs = [evaluated(0, 60.0), evaluated(2, 50.0), evaluated(3, 4.0)]
    async with (
        served(LaptopSource([folder])) as (_, url), visiting() as session,
        Stream(session, f"{url}{JOB}/events") as stream,
    ):  # fmt: skip
        assert not (await stream.next("job")).data["warning"]
        (folder / "evaluations.jsonl").write_text("damaged\n" + "".join(run.to_line() for run in runs))
        while not (warning := (await stream.next("job")).data["warning"]):
            pass
        assert warning.startswith(
            "the policy collapses: 4.00 effectively different held-out answers after step 3, 60.0"
        )
        (folder / "steps.jsonl").write_text("".join(example_step(step=step).to_line() for step in (1, 2)))
        while (await stream.next("job")).data["warning"]:  # resumed after step 2
            pass


def test_a_sample_that_moved_is_drawn_with_its_moves_by_marks_that_the_page_knows() -> None:
    content = life_content(moved_there_and_back()[0].life())
    assert [(span["name"], span["by"]) for span in content["spans"][1:]] == [
        ("generation", "generator 0"), ("move", "generator 0 -> 1"), ("generation", "generator 1"),
        ("move", "generator 1 -> 0"), ("generation", "generator 0"),
    ]  # fmt: skip
    assert {mark for span in content["spans"] for mark, _, _ in span["pieces"]} == {"·", "█", "─"}
    script = files("rlhfspec.dashboard").joinpath("static", "page.js").read_text()
    assert all(f'"{mark}": "' in script and f'told("{mark}", "{what}")' in script for mark, what in LEGEND.items())


async def test_a_sample_has_its_text_and_its_trace(tmp_path: Path) -> None:
    async with visited(write_run(tmp_path / "run")) as (session, url):
        found = await (await session.get(f"{url}{JOB}/sample", params={"id": "sums/1/0/0"})).json()
        assert (found["sample"]["text"], found["sample"]["reward"]) == ("4", 0.25)
        assert [span["name"] for span in found["trace"]["spans"]] == ["prompt", "generation", "reward", "training"]
        assert found["trace"]["seconds"] == pytest.approx(3.0)
        unknown = await (await session.get(f"{url}{JOB}/sample", params={"id": "sums/9/0/0"})).json()
        assert unknown["sample"] is None
        assert len(unknown["missing"]) == 2


def test_a_step_that_is_done_again_replaces_the_old_curve(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    reader = RunReader(folder)
    assert len(reader.changes().rows) == 3
    first = (folder / "steps.jsonl").read_text().splitlines(keepends=True)[0]
    again = example_step(step=2, reward=0.9).to_line()
    (folder / "steps.jsonl").write_text(first + again + example_step(step=3, reward=0.9).to_line())
    changes = reader.changes()
    assert changes.anew
    assert [row[2] for row in changes.rows] == [pytest.approx(1 / 3, abs=1e-5), 0.9, 0.9]


async def test_a_new_job_of_the_same_name_replaces_the_old_curve(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    MovesFile(folder).moved([moved(1)])
    async with visited(folder) as (session, url), Stream(session, f"{url}{EVENTS}") as stream:
        assert len((await stream.next("whole")).data["moves"]) == 1
        shutil.rmtree(folder)
        write_run(folder, steps=1)
        seen: tuple[list[int], list[Any]] = ([], [])
        async with asyncio.timeout(60):
            while seen != ([1], []):
                async with Stream(session, f"{url}{EVENTS}") as other:
                    whole = (await other.next("whole")).data
                    seen = ([row[0] for row in whole["rows"]], whole["moves"])


def test_a_torn_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = NewLines(path)
    path.write_bytes(b"first\nsec")
    assert [line for _, line in lines.read()] == [b"first\n"]
    with path.open("ab") as file:
        file.write(b"ond\n")
    assert list(lines.read()) == [(6, b"second\n")]
    assert list(lines.read()) == []


def test_links_and_pipes_in_place_of_run_files_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"id": "sums/1/0/0", "step": 1, "prompt": "", "text": "the secret"}\n')
    folder = write_run(tmp_path / "run")
    for name, replace in (("samples.jsonl", os.symlink), ("steps.jsonl", lambda _, path: os.mkfifo(path))):
        (folder / name).unlink()
        replace(secret, folder / name)
    reader = RunReader(folder)
    with pytest.raises(StorageError, match="not a regular file"):
        reader.changes()
    with pytest.raises(StorageError, match="symbolic links"):
        reader.samples.steps()


# ---- hostile texts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", range(len(HOSTILE)))
async def test_hostile_texts_arrive_as_text(tmp_path: Path, place: int) -> None:
    async with visited(write_run(tmp_path / "run", steps=1, texts=HOSTILE)) as (session, url):
        answer = await session.get(f"{url}{JOB}/sample", params={"id": f"sums/1/{place}/0"})
        assert answer.headers["Content-Type"].startswith("application/json")
        text = (await answer.json())["sample"]["text"]
        assert len(text) <= 20_001
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202a-\u202e\u2028\u2029\ud800-\udfff]", text)
        listed = await (await session.get(f"{url}{JOB}/samples?step=1")).json()
        assert len(listed) == len(HOSTILE)
        assert len(json.dumps(listed)) < 10_000


@pytest.mark.parametrize(
    "query", ["sample?id=../../etc/passwd", "sample?id=a/1/0/0%00", "sample", "samples?step=-1", "samples?step=9e9"]
)
async def test_nonsense_is_answered_in_one_line(tmp_path: Path, query: str) -> None:
    async with visited(write_run(tmp_path / "run")) as (session, url):
        answer = await session.get(f"{url}{JOB}/{query}")
        text = await answer.text()
        assert answer.status in (200, 404)
        assert text.count("\n") <= 1
        assert "Traceback" not in text


# ---- a live run -----------------------------------------------------------------------------------------------------


async def test_a_live_run_sends_its_events_as_they_happen(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    async with LiveRun(folder) as live, visited(folder) as (session, url):
        live.show(*snapshot(0, owned=("sums/4/0/0",)))
        live.show(window=Window(samples=(SampleHead(id="sums/4/0/1", prompt="2+2=", text="<b>4</b>"),)))
        async with Stream(session, f"{url}{EVENTS}") as stream:
            while (await stream.next("job")).data["problems"]:  # until it listens
                pass
            runs = (evaluated(0, 60.0), evaluated(4, 4.0))
            held_out = [EvaluationReport(id=f"sums/{run.step}/evaluation", job="sums", evaluation=run) for run in runs]
            await live.say(load(0, owned=("sums/4/0/0",)), load(1), moved(1), report(4), *held_out, beat())
            seen: dict[str, Any] = {}
            while {"steps", "moves", "warning"} - seen.keys() or len(
                seen.get("now", {"generators": ()})["generators"]
            ) < 2:
                told = await stream.next("steps", "moves", "now", "samples", "job")
                seen["warning" if told.name == "job" and told.data["warning"] else told.name] = told.data
        assert seen["warning"]["warning"].startswith("the policy collapses: ")
        assert [row[0] for row in seen["steps"]] == [4]
        assert [(move["source"], move["destination"], move["how"]) for move in seen["moves"]] == [(0, 1, "kv")]
        assert {each["worker"]: each["strategy"] for each in seen["now"]["generators"]}[1] == "suffix-d4-w1-b2"
        assert {"generator", "reward"} <= {each["stage"] for each in seen["now"]["workers"]}
        owned = await (await session.get(f"{url}{JOB}/sample?id=sums/4/0/0")).json()
        assert owned["owner"] == "generator-0"


async def heard(live: LiveRun, stream: Stream, record: Any) -> Any:
    """Publish until the event arrives: earlier signals without a subscriber are lost."""

    async def say() -> None:
        while True:
            await live.say(record)
            await asyncio.sleep(0.5)

    saying = asyncio.create_task(say())
    try:
        return await stream.next("moves")
    finally:
        saying.cancel()


async def test_a_browser_that_comes_back_misses_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    async with LiveRun(folder) as live, served(LaptopSource([folder])) as (dashboard, url), visiting() as session:
        async with Stream(session, f"{url}{EVENTS}") as stream:
            while (await stream.next("job")).data["problems"]:
                pass
            last = await heard(live, stream, moved(1))
        async with Stream(session, f"{url}{EVENTS}") as other:
            await heard(live, other, moved(2))
        async with Stream(session, f"{url}{EVENTS}", last_id=last.id) as stream:
            missed = await stream.next("moves", "whole")
            assert (missed.name, [move["id"] for move in missed.data]) == ("moves", ["sums/move/2"])
        async with Stream(session, f"{url}{EVENTS}", last_id="another.7") as stream:
            moves = (await stream.next("moves", "whole")).data["moves"]
            assert {move["id"] for move in moves} == {"sums/move/1", "sums/move/2"}
        assert dashboard.feeds.keys == [JobKey("laptop", "run")]


async def test_the_page_says_what_is_away_and_when_the_run_ends(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    async with visited(folder) as (session, url), Stream(session, f"{url}{EVENTS}") as stream:
        assert not (await stream.next("job")).data["is_live"]
        async with LiveRun(folder):
            while not (told := (await stream.next("job")).data)["is_live"] or told["problems"]:
                pass
        while (await stream.next("job")).data["is_live"]:
            pass


# ---- readers --------------------------------------------------------------------------------------------------------


async def test_a_slow_browser_is_cut_off_and_others_are_not() -> None:
    events = EventStream()
    slow, quick = events.reader(dict), events.reader(dict)
    for number in range(MOST_UNREAD + 1):
        events.keep("moves", [number])
        quick.queue.get_nowait()
    assert slow.is_cut.is_set()
    assert not quick.is_cut.is_set()
    assert events.readers == {quick}
    assert slow.queue.qsize() <= MOST_UNREAD


async def test_a_browser_away_for_too_long_gets_the_whole_state() -> None:
    events = EventStream()
    events.keep("moves", [0])
    last = events.reader(dict).queue.get_nowait().id
    for number in range(1000):
        events.keep("moves", [number])
    assert events.reader(dict, last).queue.get_nowait().name == "whole"


async def test_hidden_events_are_not_sent() -> None:
    events = EventStream()
    events.latest("samples", ["a text"])
    blind = events.reader(dict, hidden=("samples",))
    events.latest("samples", ["another"])
    assert [blind.queue.get_nowait().name for _ in range(blind.queue.qsize())] == ["whole"]


# ---- who may --------------------------------------------------------------------------------------------------------

PROTECTED = (
    "/api/jobs", "/api/events", *(f"{JOB}/{rest}" for rest in ("events", "yaml", "samples", "sample?id=sums/1/0/0")),
)  # fmt: skip


@pytest.mark.parametrize("path", PROTECTED)
@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", TOKEN[:-1], "x" * 20_000, "\u00fc", "a b"])
async def test_without_a_token_every_path_answers_401(tmp_path: Path, path: str, token: str) -> None:
    async with visited(write_run(tmp_path / "run", steps=1, texts=("the text",)), token="") as (session, url):
        cookies = {f"rlhfspec-{url.rpartition(':')[2]}": token} if token.isascii() and " " not in token else {}
        if len(token) < 4000:
            answer = await session.get(f"{url}{path}", cookies=cookies)
            assert answer.status == 401
            assert await answer.text() == "log in first\n"


async def test_the_printed_address_lets_a_browser_in(tmp_path: Path) -> None:
    async with visited(write_run(tmp_path / "run"), token="") as (session, url):
        stranger = await session.get(f"{url}/", allow_redirects=False)
        assert (stranger.status, stranger.headers["Location"]) == (303, "/login")
        let_in = await session.get(f"{url}/?token={TOKEN}", allow_redirects=False)
        assert let_in.headers["Location"] == "/"
        cookie = let_in.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        name, _, rest = cookie.partition("=")
        assert (await session.get(f"{url}/", cookies={name: rest.partition(";")[0]})).status == 200
        refused = await session.get(f"{url}/?token=wrong", allow_redirects=False)
        assert "Set-Cookie" not in refused.headers


@pytest.mark.parametrize(
    ("headers", "method", "path"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, "GET", "/api/jobs"),
        ({"Sec-Fetch-Site": "same-site", "Sec-Fetch-Mode": "navigate"}, "GET", "/api/jobs"),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}, "POST", "/login"),
        ({"Origin": "http://evil.example"}, "POST", "/login"),
        ({"Origin": "http://evil.example"}, "GET", "/api/events"),
        ({"Host": "evil.example"}, "GET", "/api/jobs"),
        ({"Host": "evil.example:8000"}, "GET", "/"),
    ],
)
async def test_cross_site_requests_are_refused(tmp_path: Path, headers: dict[str, str], method: str, path: str) -> None:
    async with visited(write_run(tmp_path / "run")) as (session, url):
        answer = await session.request(method, f"{url}{path}", headers=headers, allow_redirects=False)
        assert answer.status == 403
        assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.parametrize("path", ["/", "/login", "/static/page.js", "/static/none", "/api/jobs", "/none", "/healthz"])
async def test_every_answer_says_what_a_browser_may_do_with_it(tmp_path: Path, path: str) -> None:
    async with visited(write_run(tmp_path / "run")) as (session, url):
        answer = await session.get(f"{url}{path}")
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert TOKEN not in await answer.text()


async def test_only_reading_is_possible(tmp_path: Path) -> None:
    async with visited(write_run(tmp_path / "run")) as (session, url):
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            for path in ("/api/jobs", JOB, EVENTS, "/"):
                assert (await session.request(method, f"{url}{path}")).status in (404, 405)


async def test_unchanged_content_is_answered_with_304(tmp_path: Path) -> None:
    async with visited(write_run(tmp_path / "run")) as (session, url):
        for path in ("/", "/static/page.js", "/api/jobs", f"{JOB}/samples?step=1"):
            tag = (await session.get(f"{url}{path}")).headers["ETag"]
            again = await session.get(f"{url}{path}", headers={"If-None-Match": tag})
            assert (again.status, await again.read()) == (304, b"")


def test_the_page_is_small_and_asks_nobody_else() -> None:
    folder = Path(server_module.__file__).with_name("static")
    assert {path.name for path in folder.iterdir()} == STATIC.keys()
    contents = {name: (folder / name).read_text() for name in STATIC}
    assert sum(map(len, contents.values())) < 60_000
    for name, content in contents.items():
        assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", content), name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function", content), name
        assert not re.search(r"\son\w+=|style=|<style", content) or not name.endswith("html"), name


# ---- much at once ---------------------------------------------------------------------------------------------------


async def test_200_generators_and_10000_samples_do_not_choke_the_server(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    async with LiveRun(folder) as live, visited(folder) as (session, url):
        live.show(*many_snapshots(200, owned=10_000))
        async with (
            Stream(session, f"{url}{EVENTS}") as one,
            Stream(session, f"{url}{EVENTS}") as two,
            Stream(session, f"{url}{EVENTS}"),
        ):
            while (await one.next("job")).data["problems"]:
                pass
            began, cpu = time.monotonic(), time.process_time()
            for number in range(10):
                await live.say(*(load(worker, at=number) for worker in range(200)))
                await live.say(*(moved(200 * number + each) for each in range(200)))
            num_events = 0
            while (last := (await two.next("now", "moves"))).name != "moves" or last.data[-1]["id"] != "sums/move/1999":
                num_events += 1
                assert len(json.dumps(last.data)) < 100_000
            passed, used = time.monotonic() - began, time.process_time() - cpu
            print(f"2,000 loads and 2,000 moves: {num_events} events, {used:.2f} s of CPU in {passed:.2f} s")
            assert num_events <= 6 * (passed + 2)
            assert (await session.get(f"{url}/api/jobs")).status == 200


async def test_all_readers_share_one_feed_that_ends_after_the_last(tmp_path: Path) -> None:
    feeds = Feeds(LaptopSource([write_run(tmp_path / "run")]), linger_seconds=0.0)
    key = JobKey("laptop", "run")
    async with feeds.of(key) as one, feeds.of(key) as other:
        assert one is other
    await until(lambda: not feeds.keys, "the feed ends")
    await feeds.close()


# ---- the command ----------------------------------------------------------------------------------------------------


def test_the_command_refuses_in_one_line_what_is_no_run(tmp_path: Path) -> None:
    assert "RUN: is not a folder" in command(["dashboard", str(tmp_path / "nothing")], 2).output


# ---- servers that many jobs share -----------------------------------------------------------------------------------


async def test_the_dashboard_of_a_release_hears_every_run_and_says_nothing(tmp_path: Path) -> None:
    with SharedServers(tmp_path) as servers:
        mine = servers.release_credentials("dashboard")
        heard: asyncio.Queue[Record] = asyncio.Queue()
        address = Address(job="sums", uid=UID, nats_url=servers.nats_url, credentials=mine, role="dashboard")
        hearing = Hearing(address, heard.put_nowait)
        listening = asyncio.create_task(hearing.run())
        speaker = await connect(servers, "generator", servers.credentials("generator", run=UID))
        await servers.make_streams(UID)
        while hearing.problem:
            await asyncio.sleep(0.01)
        await Bus(speaker, "sums", uid=UID, workers={"generator": 1}).publish(moved(3))
        async with asyncio.timeout(60):
            assert await heard.get() == moved(3)
        silent = await connect(servers, "dashboard", mine)
        with pytest.raises(InvalidRequest, match=r"role dashboard may not publish to rlhf\.sums"):
            await silent.publish(f"rlhf.sums.{UID}.sample", b"forged", id="1")
        await ended(listening)
        for transport in (speaker, silent):
            await transport.close()


async def connect(servers: SharedServers, role: str, credentials: Path) -> NatsTransport:
    inbox = inbox_of(role, "release" if role == "dashboard" else UID)
    proof, tls = NatsProof(creds=credentials / f"{role}.creds"), servers_tls(credentials, role)
    return await NatsTransport.connect(servers.nats_url, name=role, role=role, inbox_prefix=inbox, proof=proof, tls=tls)
