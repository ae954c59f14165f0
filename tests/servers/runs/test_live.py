"""Live state survives a killed, stopped, empty or refusing Redis, and blocks no process."""

import asyncio
import gc
import logging
import os
import re
import signal
import ssl
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio
from snapshots import GENERATOR, LOAD, READY, WAITS
from typer.testing import CliRunner

from rlhfspec.cli.main import app
from rlhfspec.errors import InvalidRequest, ServerFailed
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.access.rights import CONTROL
from rlhfspec.messages.servers.credentials.certificates import SERVERS_AUTHORITY, ServerTls, create_credentials
from rlhfspec.messages.servers.redis import RedisServer
from rlhfspec.messages.transport.clock import SystemClock
from rlhfspec.runs.live import live
from rlhfspec.runs.live.live import LiveBeats, LiveState, LiveView, RecentLines, read_live
from rlhfspec.runs.live.run_state import SILENT_SECONDS, KnownRun, News, ProcessNews
from rlhfspec.runs.view.roster import process_states
from rlhfspec.stage.vitals import Vitals

UID = "3f2a"
REWARD = (replace(READY, stage="reward", pid=8), replace(WAITS, stage="reward", what="samples"))


def told(*news: News) -> KnownRun:
    known = KnownRun(SystemClock())
    known.tell(*news)
    return known


def names(view: LiveView) -> list[str]:
    return [worker.name for worker in view.run.workers.values()]


class Place:
    def __init__(self, folder: Path) -> None:
        self.credentials = folder / "credentials"
        create_credentials(self.credentials, [CONTROL, "view"])
        self.server = RedisServer(folder / "redis", run=UID, password_file=self.credentials / "redis.password")

    def state(self) -> LiveState:
        return LiveState(self.server.url, UID, credentials=self.credentials)

    async def read(self) -> LiveView:
        return await read_live(self.server.url, UID, credentials=self.credentials)

    async def until(self, holds: Callable[[LiveView], bool]) -> LiveView:
        async with asyncio.timeout(60.0):
            while not holds(view := await self.read()):
                await asyncio.sleep(0.01)
        return view


@asynccontextmanager
async def a_server(tmp_path: Path) -> AsyncIterator[Place]:
    place = Place(tmp_path)
    await place.server.start()
    try:
        yield place
    finally:
        if place.server.pid is not None:
            os.kill(place.server.pid, signal.SIGCONT)
        await place.server.stop()


@asynccontextmanager
async def beating(state: LiveState, known: KnownRun, recent: RecentLines | None = None) -> AsyncIterator[LiveBeats]:
    beats = LiveBeats(state, Vitals(), known, recent or RecentLines())
    running = asyncio.create_task(beats.run())
    try:
        yield beats
    finally:
        await beats.stop()
        await running
        beats.close()


async def test_a_viewer_sees_the_last_state_of_every_worker(tmp_path: Path) -> None:
    async with a_server(tmp_path) as place:
        assert await place.read() == LiveView()
        lines = RecentLines()
        lines.step('{"step": 1}')
        lines.sample("sums/1/0/0", "2+2=", "4 \ud800")
        known = told(*GENERATOR, *REWARD, ProcessNews(stage="trainer", worker=0, phase="left"))
        async with beating(place.state(), known, lines):
            view = await place.until(lambda view: len(view.run.workers) == 2)
            assert names(view) == ["generator-0", "reward-0"], "one that left is not shown"
            [generator, reward] = process_states(view.run, view.now)
            assert (generator.host, generator.pid, generator.doing, generator.what) == ("node", 7, "waiting", "prompts")
            assert (generator.load, reward.load) == (LOAD, None)
            assert set(view.run.owners) == {"sums/3/0/0", "sums/3/0/1"}
            assert [sample.text for sample in view.window.samples] == ["4 ?"]
            known.tell(ProcessNews(stage="reward", worker=0, phase="restarting", what="killed by SIGKILL"))
            view = await place.until(lambda view: process_states(view.run, view.now)[1].doing == "restarting")
        assert await place.read() == LiveView(), "a run that is over is not shown"


async def test_an_old_live_view_keeps_its_age(tmp_path: Path) -> None:
    """A dead writer's workers fall silent by the server's clock."""
    async with a_server(tmp_path) as place:
        state = place.state()
        sending = asyncio.create_task(state.run())
        known = told(*GENERATOR)
        state.write(LiveView(run=known.run, now=known.clock.now() + SILENT_SECONDS - 1.0))
        view = await place.until(lambda view: bool(view.run.workers))
        assert [each.doing for each in process_states(view.run, view.now)] == ["waiting"]
        password = (place.credentials / "redis.password").read_text()
        async with redis.asyncio.Redis.from_url(place.server.url, password=password) as client:
            await client.pexpire(f"rlhfspec:{UID}:live", 28_000)
        view = await read_live(place.server.url, UID, credentials=place.credentials, now=1000.0)
        [worker] = process_states(view.run, view.now)
        assert worker.doing == "silent"
        assert SILENT_SECONDS + 1.0 <= worker.since_seconds < 30.0
        sending.cancel()
        await asyncio.wait([sending])
        await state.close()


async def test_restarted_empty_redis_is_filled_by_next_beat(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlhfspec.stage")
    async with a_server(tmp_path) as place:
        state = place.state()
        async with beating(state, told(*GENERATOR, *REWARD)):
            await place.until(lambda view: len(view.run.workers) == 2)
            caplog.clear()  # a busy machine may have been too slow before
            os.kill(place.server.pid or 0, signal.SIGKILL)
            await place.server.wait()
            while state.num_failures < 3:
                await asyncio.sleep(0.01)
            with pytest.raises(ServerFailed, match=r"redis: .*connecting to .*redis.sock"):
                await place.read()
            await place.server.start()
            began = time.monotonic()
            await place.until(lambda view: len(view.run.workers) == 2)
            print(f"full again after {time.monotonic() - began:.2f} s")
            while not any("is back" in each.message for each in caplog.records):
                await asyncio.sleep(0.01)
        assert sum("out of date" in each.message for each in caplog.records) == 1, "once per outage"


def view_of(pid: int) -> LiveView:
    known = told(replace(READY, pid=pid), WAITS, LOAD)
    return LiveView(run=known.run, now=known.clock.now())


async def test_a_server_that_hangs_delays_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "CONNECT_SECONDS", live.DEADLINE_SECONDS)
    async with a_server(tmp_path) as place:
        state = place.state()
        sending = asyncio.create_task(state.run())
        os.kill(place.server.pid or 0, signal.SIGSTOP)
        pid = 0
        while state.num_failures < 3:  # it tries on
            for _ in range(100):
                pid += 1
                state.write(view_of(pid))
            await asyncio.sleep(0)
        [said] = [each.message for each in caplog.records]
        assert re.fullmatch(
            "redis: (no answer in time|Timeout .*); the live view is out of date until it is back", said
        )
        os.kill(place.server.pid or 0, signal.SIGCONT)

        def is_newest(view: LiveView) -> bool:
            state.write(view_of(pid))  # a beat: what was on its way in the outage may come late
            return [worker.pid for worker in view.run.workers.values()] == [pid]

        await place.until(is_newest)
        os.kill(place.server.pid or 0, signal.SIGSTOP)
        state.write(view_of(0))
        sending.cancel()
        await asyncio.wait([sending])
        await state.close()  # has a deadline too


async def test_a_wrong_password_is_logged_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with a_server(tmp_path) as place:
        (place.credentials / "redis.password").write_text("guessed")
        state = place.state()
        async with beating(state, told(*GENERATOR)):
            while state.num_failures < 2:
                await asyncio.sleep(0.01)
        reason = "invalid username-password pair or user is disabled."
        assert [each.message for each in caplog.records] == [
            f"redis: {reason}; the live view is out of date until it is back"
        ]
        with pytest.raises(ServerFailed) as refused:
            await place.read()
        assert str(refused.value) == f"redis: {reason}"
        assert "guessed" not in caplog.text


@asynccontextmanager
async def passing_on(place: Place, tls: ssl.SSLContext | None = None, delay_seconds: float = 0.0) -> AsyncIterator[str]:
    """Yield the address of a proxy of the server, which speaks TLS as in a cluster, or begins late."""

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(delay_seconds)
        inner, outer = await asyncio.open_unix_connection(place.server.url.removeprefix("unix://"))
        await asyncio.gather(pump(reader, outer), pump(inner, writer))

    async with await asyncio.start_server(passed_on, "127.0.0.1", 0, ssl=tls) as front:
        yield f"redis{'s' if tls else ''}://127.0.0.1:{front.sockets[0].getsockname()[1]}"


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(65536):
        writer.write(part)
    writer.close()


async def test_over_tls_only_a_server_of_the_right_authority_is_read(tmp_path: Path) -> None:
    """The packaged server has no TLS, so a proxy terminates it as in a cluster."""
    async with a_server(tmp_path) as place:
        strange = tmp_path / "strange"
        create_credentials(strange, ["view"])
        for folder in (place.credentials, strange):
            (folder / SERVERS_AUTHORITY).write_bytes((folder / "ca.pem").read_bytes())
        files, tls = ServerTls.of(place.credentials, "nats"), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(files.certificate, files.key)
        async with passing_on(place, tls) as url:
            state = LiveState(url, UID, credentials=place.credentials)
            async with beating(state, told(*GENERATOR)):
                await place.until(lambda view: names(view) == ["generator-0"])
                view = await read_live(url, UID, credentials=place.credentials)
                assert names(view) == ["generator-0"]
                with pytest.raises(ServerFailed, match=r"certificate verify failed") as refused:
                    await read_live(url, UID, credentials=strange)
                assert "\n" not in str(refused.value)
                with pytest.raises(ServerFailed, match=r"redis: .*(closed|reset)"):
                    await read_live(url.replace("rediss", "redis"), UID, credentials=place.credentials)


async def test_a_connection_that_takes_longer_than_a_write_is_made(tmp_path: Path) -> None:
    async with (
        a_server(tmp_path) as place,
        passing_on(place, delay_seconds=2 * live.DEADLINE_SECONDS) as url,
        beating(LiveState(url, UID, credentials=place.credentials), told(*GENERATOR)),
    ):
        await place.until(lambda view: names(view) == ["generator-0"])


async def test_a_live_view_in_an_unknown_format_is_not_shown(tmp_path: Path) -> None:
    async with a_server(tmp_path) as place:
        password = (place.credentials / "redis.password").read_text()
        async with redis.asyncio.Redis.from_url(place.server.url, password=password) as client:
            for value in (b"{}", b"\xff", b'{"now": 1}', b"[" * 10_000):
                await client.set(f"rlhfspec:{UID}:live", value)
                assert await place.read() == LiveView()
            await client.set("rlhfspec:other:live", b"{}")
        async with beating(place.state(), told(*GENERATOR)):
            await place.until(lambda view: names(view) == ["generator-0"])


async def _read(place: Place) -> None:
    await place.read()


async def _beat(place: Place) -> None:
    await LiveBeats(place.state(), Vitals(), told(*GENERATOR), RecentLines()).run()


@pytest.mark.parametrize("look", [_read, _beat])
def test_cancelling_any_time_leaves_no_connection(tmp_path: Path, look: Callable[[Place], Awaitable[None]]) -> None:
    async def cancelled(place: Place, moment: int) -> None:
        task = asyncio.ensure_future(look(place))
        for _ in range(moment):
            await asyncio.sleep(0)
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)

    place = Place(tmp_path)
    with asyncio.Runner() as runner:
        runner.run(place.server.start())
        try:
            gc.freeze()  # what other tests left is not looked at each time
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", ResourceWarning)
                for moment in range(60):
                    asyncio.run(cancelled(place, moment))
                    gc.collect()
        finally:
            gc.unfreeze()
            runner.run(place.server.stop())
    assert [str(each.message) for each in caught] == []


def test_the_window_of_recent_lines_is_bounded() -> None:
    lines = RecentLines()
    for number in range(1000):
        lines.step(str(number))
        lines.sample(str(number), "p" * 10_000, "t" * 10_000)
    window = lines.now()
    assert window.steps == tuple(map(str, range(900, 1000)))
    assert len(window.samples) == 50
    assert {len(sample.prompt) for sample in window.samples} == {200}


def test_a_url_that_is_not_of_redis_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="redis_url: must begin with one of unix://, redis://, rediss://"):
        LiveState("http://localhost", UID)
    with pytest.raises(InvalidRequest, match=r"credentials: cannot be read: No such file"):
        LiveState("redis://localhost", UID, credentials=tmp_path)


async def test_top_shows_who_runs_where(tmp_path: Path) -> None:
    async with a_server(tmp_path) as place:
        write_connections(tmp_path, place)
        known = told(READY, replace(WAITS, what="\x1b[31m [bold]2 samples", since_seconds=3600.0), LOAD, *REWARD)
        async with beating(place.state(), known):
            await place.until(lambda view: len(view.run.workers) == 2)
            result = await asyncio.to_thread(CliRunner().invoke, app, ["top", str(tmp_path)])
        assert result.exit_code == 0, result.output
        [generator] = [line for line in result.output.splitlines() if "generator-0" in line]
        cells = [cell.strip() for cell in generator.split("│")[1:-1]]
        assert cells == ["generator-0", "node:7", "waiting", "␛[31m [bold]2 samples", cells[4], "7 s", "2", "1", "123",
                         "2"]  # fmt: skip
        assert float(cells[4].removesuffix(" s")) >= 3600.0, "and as long as it was not heard since"
        assert result.output.index("generator-0") < result.output.index("reward-0"), "as the stages stand in the map"


def test_top_explains_in_one_line_why_it_shows_nothing(tmp_path: Path) -> None:
    def top() -> tuple[int, str]:
        result = CliRunner().invoke(app, ["top", str(tmp_path)])
        return result.exit_code, result.output

    assert top() == (2, f"RUN: no run with --processes is active in this folder (got {str(tmp_path)!r})\n")
    write_connections(tmp_path, Place(tmp_path))
    code, output = top()
    assert (code, output.count("\n")) == (1, 1)
    assert output.startswith("redis: ")
    (tmp_path / "processes" / "connections.json").write_text("{}")
    assert "connections.json" in top()[1]


def write_connections(run: Path, place: Place) -> None:
    connections = Connections(
        uid=UID, job_file=run, base_folder=run, folder=run, nats_url="", redis_url=place.server.url,
        credentials=place.credentials, weights_folder=run,
    )  # fmt: skip
    (run / "processes").mkdir(exist_ok=True)
    (run / "processes" / "connections.json").write_text(connections.model_dump_json())
