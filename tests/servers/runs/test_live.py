"""What may be lost, over a real server: killed, stopped, empty, with the wrong password; nobody waits for it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import signal
import socket
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio
from snapshots import GENERATOR, LOAD, WAITS
from typer.testing import CliRunner

from rlhfspec.cli.main import app
from rlhfspec.errors import InvalidRequest, ServerFailed
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.servers.certificates import create_credentials, server_tls
from rlhfspec.messages.servers.redis import RedisServer
from rlhfspec.runs.live import live
from rlhfspec.runs.live.live import LiveBeats, LiveState, LiveView, RecentLines, WorkerSnapshot, read_live, snapshot_of
from rlhfspec.stage.vitals import Vitals

UID = "3f2a"
REWARD = WorkerSnapshot(host="node", pid=8, state=replace(WAITS, stage="reward", what="samples"))


class Place:
    """One server of a run, its credentials, and how often it is asked."""

    def __init__(self, folder: Path) -> None:
        self.credentials = folder / "credentials"
        create_credentials(self.credentials, ["generator", "view"])
        password_file = self.credentials / "redis.password"
        self.server = RedisServer(folder / "redis", run=UID, password_file=password_file)

    def state(self) -> LiveState:
        return LiveState(self.server.url, UID, role="generator", credentials=self.credentials)

    async def read(self) -> LiveView:
        return await read_live(self.server.url, UID, role="view", credentials=self.credentials)

    async def until(self, holds: Callable[[LiveView], bool]) -> LiveView:
        async with asyncio.timeout(60.0):
            while not holds(view := await self.read()):
                await asyncio.sleep(0.01)
        return view


def with_server(tmp_path: Path, check: Callable[[Place], Awaitable[None]]) -> None:
    async def main() -> None:
        place = Place(tmp_path)
        await place.server.start()
        try:
            await check(place)
        finally:
            if place.server.pid is not None:
                os.kill(place.server.pid, signal.SIGCONT)
            await place.server.stop()

    asyncio.run(main())


@asynccontextmanager
async def beating(state: LiveState, look: Callable[[], WorkerSnapshot | live.Window]) -> AsyncIterator[LiveBeats]:
    beats = LiveBeats(state, Vitals(), look)
    running = asyncio.create_task(beats.run())
    try:
        yield beats
    finally:
        await beats.stop()
        await running
        beats.close()


def test_who_reads_sees_the_last_beat_of_everybody(tmp_path: Path) -> None:
    async def check(place: Place) -> None:
        assert await place.read() == LiveView(workers={}, silent_seconds={}, window=live.Window())
        lines = RecentLines()
        lines.step('{"step": 1}')
        lines.sample("sums/1/0/0", "2+2=", "4 \ud800")
        async with (
            beating(place.state(), lambda: GENERATOR),
            beating(place.state(), lambda: REWARD),
            beating(place.state(), lines.now),
        ):
            view = await place.until(lambda view: len(view.workers) == 2 and bool(view.window.steps))
            assert view.workers == {"generator-0": GENERATOR, "reward-0": REWARD}
            assert view.loads == {"generator-0": LOAD}
            assert view.owners == {"sums/3/0/0": "generator-0", "sums/3/0/1": "generator-0"}
            assert [sample.text for sample in view.window.samples] == ["4 ?"]
        assert (await place.read()).workers == {}, "who left in order is not shown"

    with_server(tmp_path, check)


def test_a_worker_says_where_it_runs_and_what_it_does() -> None:
    worker = Vitals().worker("generator", 3)
    with worker.waiting("prompts"):
        snapshot = snapshot_of(worker, LOAD, ["sums/3/0/0"])
    assert (snapshot.worker, snapshot.host, snapshot.pid) == ("generator-3", socket.gethostname(), os.getpid())
    assert (snapshot.state.what, snapshot.load, snapshot.owned) == ("prompts", LOAD, ("sums/3/0/0",))


def test_of_two_that_claim_a_sample_the_last_to_speak_has_it() -> None:
    other = replace(GENERATOR, state=replace(WAITS, worker=1), owned=("sums/3/0/1",))
    for silent, owner in ((0.1, "generator-1"), (9.0, "generator-0")):
        workers = {"generator-0": GENERATOR, "generator-1": other}
        view = LiveView(
            workers=workers, silent_seconds={"generator-0": 1.0, "generator-1": silent}, window=live.Window()
        )
        assert view.owners == {"sums/3/0/0": "generator-0", "sums/3/0/1": owner}


def test_a_server_that_comes_back_empty_is_full_again_with_the_next_beats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rlhfspec.stage")

    async def check(place: Place) -> None:
        state = place.state()
        async with beating(state, lambda: GENERATOR), beating(place.state(), lambda: REWARD):
            await place.until(lambda view: len(view.workers) == 2)
            caplog.clear()  # a busy machine may have been too slow before
            os.kill(place.server.pid or 0, signal.SIGKILL)
            await place.server.wait()
            while state.num_failures < 3:
                await asyncio.sleep(0.01)
            with pytest.raises(ServerFailed, match=r"redis: .*connecting to .*redis.sock"):
                await place.read()
            await place.server.start()
            began = time.monotonic()
            await place.until(lambda view: len(view.workers) == 2)
            print(f"full again after {time.monotonic() - began:.2f} s")
            while sum("is back" in each.message for each in caplog.records) < 2:
                await asyncio.sleep(0.01)
        assert sum("out of date" in each.message for each in caplog.records) == 2, "once per outage and process"

    with_server(tmp_path, check)


def test_a_server_that_hangs_delays_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "CONNECT_SECONDS", live.DEADLINE_SECONDS)

    async def check(place: Place) -> None:
        state = place.state()
        sending = asyncio.create_task(state.run())
        os.kill(place.server.pid or 0, signal.SIGSTOP)
        pid = 0
        while state.num_failures < 3:  # it tries on
            for _ in range(100):
                pid += 1
                state.write(replace(GENERATOR, pid=pid))
            await asyncio.sleep(0)
        assert len(state._unsent) <= 1, "the newest replaces what could not be sent"
        [said] = [each.message for each in caplog.records]
        assert re.fullmatch(
            "redis: (no answer in time|Timeout .*); the live view is out of date until it is back", said
        )
        os.kill(place.server.pid or 0, signal.SIGCONT)

        def is_newest(view: LiveView) -> bool:
            state.write(replace(GENERATOR, pid=pid))  # a beat: what was on its way in the outage may come late
            return "generator-0" in view.workers and view.workers["generator-0"].pid == pid

        await place.until(is_newest)
        os.kill(place.server.pid or 0, signal.SIGSTOP)
        state.write(GENERATOR)
        sending.cancel()
        await asyncio.wait([sending])
        await state.close()  # has a deadline too

    with_server(tmp_path, check)


def test_a_wrong_password_is_a_reason_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check(place: Place) -> None:
        (place.credentials / "redis.password").write_text("guessed")
        state = place.state()
        async with beating(state, lambda: GENERATOR):
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

    with_server(tmp_path, check)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while part := await reader.read(65536):
        writer.write(part)
    writer.close()


def test_over_tls_both_sides_show_a_certificate(tmp_path: Path) -> None:
    """The server that the extra brings speaks no TLS; in front of it stands what would stand there in a cluster."""

    async def check(place: Place) -> None:
        async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner, outer = await asyncio.open_unix_connection(place.server.url.removeprefix("unix://"))
            await asyncio.gather(pump(reader, outer), pump(inner, writer))

        strange = tmp_path / "strange"
        create_credentials(strange, ["view"])
        async with await asyncio.start_server(
            passed_on, "127.0.0.1", 0, ssl=server_tls(place.credentials, "generator")
        ) as front:
            port = front.sockets[0].getsockname()[1]
            url = f"rediss://127.0.0.1:{port}"
            state = LiveState(url, UID, role="generator", credentials=place.credentials)
            async with beating(state, lambda: GENERATOR):
                await place.until(lambda view: "generator-0" in view.workers)
                view = await read_live(url, UID, role="view", credentials=place.credentials)
                assert view.workers == {"generator-0": GENERATOR}
                with pytest.raises(ServerFailed, match=r"certificate verify failed") as refused:
                    await read_live(url, UID, role="view", credentials=strange)
                assert "\n" not in str(refused.value)
                with pytest.raises(ServerFailed, match=r"redis: .*(closed|reset)"):
                    await read_live(url.replace("rediss", "redis"), UID, role="view", credentials=place.credentials)

    with_server(tmp_path, check)


def test_a_connection_that_takes_longer_than_a_write_is_made(tmp_path: Path) -> None:
    """As on a busy machine, where TLS takes its time."""

    async def check(place: Place) -> None:
        async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(2 * live.DEADLINE_SECONDS)
            inner, outer = await asyncio.open_unix_connection(place.server.url.removeprefix("unix://"))
            await asyncio.gather(pump(reader, outer), pump(inner, writer))

        async with await asyncio.start_server(passed_on, "127.0.0.1", 0) as front:
            url = f"redis://127.0.0.1:{front.sockets[0].getsockname()[1]}"
            async with beating(LiveState(url, UID, role="generator", credentials=place.credentials), lambda: GENERATOR):
                await place.until(lambda view: "generator-0" in view.workers)

    with_server(tmp_path, check)


def test_what_another_version_wrote_is_not_shown(tmp_path: Path) -> None:
    async def check(place: Place) -> None:
        password = (place.credentials / "redis.password").read_text()
        async with (
            redis.asyncio.Redis.from_url(place.server.url, password=password) as client,
            beating(place.state(), lambda: GENERATOR),
        ):
            for number, value in enumerate((b"{}", b"\xff", b'{"host": 1}', b"[" * 10_000)):
                await client.set(f"rlhfspec:{UID}:worker:reward-{number}", value)
                await client.sadd(f"rlhfspec:{UID}:workers", f"reward-{number}", b"\xff")
            await client.set(f"rlhfspec:{UID}:window", b"no window")
            await client.set("rlhfspec:other:worker:reward-0", b"{}")
            view = await place.until(lambda view: "generator-0" in view.workers)
            assert view.workers == {"generator-0": GENERATOR}
            assert view.window == live.Window()

    with_server(tmp_path, check)


async def _read(place: Place) -> None:
    await place.read()


async def _beat(place: Place) -> None:
    await LiveBeats(place.state(), Vitals(), lambda: GENERATOR).run()


@pytest.mark.parametrize("look", [_read, _beat])
def test_whoever_is_cancelled_at_any_moment_leaves_no_connection(
    tmp_path: Path, look: Callable[[Place], Awaitable[None]]
) -> None:
    """Cancelled again and again while it closes, as who waits for its end may do."""

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


def test_the_window_is_bounded() -> None:
    lines = RecentLines()
    for number in range(1000):
        lines.step(str(number))
        lines.sample(str(number), "p" * 10_000, "t" * 10_000)
    window = lines.now()
    assert window.steps == tuple(map(str, range(900, 1000)))
    assert len(window.samples) == 50
    assert {len(sample.prompt) for sample in window.samples} == {200}


def test_what_is_no_redis_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="redis_url: must begin with one of unix://, redis://, rediss://"):
        LiveState("http://localhost", UID, role="view")
    with pytest.raises(InvalidRequest, match=r"credentials: cannot be read: No such file"):
        LiveState("redis://localhost", UID, role="view", credentials=tmp_path)


# ---- rlhfspec top ---------------------------------------------------------------------------------------------------


def test_top_shows_who_runs_where(tmp_path: Path) -> None:
    async def check(place: Place) -> None:
        write_connections(tmp_path, place)
        what = replace(GENERATOR, state=replace(WAITS, what="\x1b[31m [bold]2 samples"))
        async with beating(place.state(), lambda: what), beating(place.state(), lambda: REWARD):
            await place.until(lambda view: len(view.workers) == 2)
            result = await asyncio.to_thread(CliRunner().invoke, app, ["top", str(tmp_path)])
        assert result.exit_code == 0, result.output
        [generator] = [line for line in result.output.splitlines() if "generator-0" in line]
        cells = [cell.strip() for cell in generator.split("│")[1:-1]]
        assert cells == ["generator-0", "node:7", "waiting", "␛[31m [bold]2 samples", "1.5 s", "7 s", "2", "1", "123",
                         "2"]  # fmt: skip
        assert result.output.index("generator-0") < result.output.index("reward-0"), "as the stages stand in the map"

    with_server(tmp_path, check)


def test_top_says_in_one_line_why_there_is_nothing_to_show(tmp_path: Path) -> None:
    def top() -> tuple[int, str]:
        result = CliRunner().invoke(app, ["top", str(tmp_path)])
        return result.exit_code, result.output

    assert top() == (2, f"RUN: no run with --processes is going on there (got {str(tmp_path)!r})\n")
    place = Place(tmp_path)
    write_connections(tmp_path, place)
    code, output = top()
    assert (code, output.count("\n")) == (1, 1)
    assert output.startswith("redis: ")
    (tmp_path / "processes" / "connections.json").write_text("{}")
    assert top()[1].startswith("RUN: processes/connections.json is damaged")


def write_connections(run: Path, place: Place) -> None:
    connections = Connections(
        uid=UID, job_file=run, base_folder=run, folder=run, nats_url="", redis_url=place.server.url,
        credentials=place.credentials, weights_folder=run,
    )  # fmt: skip
    (run / "processes").mkdir(exist_ok=True)
    (run / "processes" / "connections.json").write_text(connections.model_dump_json())
