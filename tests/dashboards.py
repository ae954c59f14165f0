"""Fixtures of dashboard tests: finished and live runs, and a served dashboard."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import aiohttp
from aiohttp.test_utils import TestServer
from run_folders import example_job, example_sample

from rlhfspec.dashboard.access import Access, LaptopAccess
from rlhfspec.dashboard.jobs.laptop import LaptopSource
from rlhfspec.dashboard.jobs.source import JobSource
from rlhfspec.dashboard.server import Dashboard
from rlhfspec.messages import loop
from rlhfspec.messages.access.connecting import connect
from rlhfspec.messages.access.connections import Connections
from rlhfspec.messages.access.rights import BUS_ROLES, CONTROL, rights_of
from rlhfspec.messages.records import EvaluationReport, Heartbeat, Load, Moved, Record, Score, StepReport, WorkerInfo
from rlhfspec.messages.records.metrics import example_step
from rlhfspec.messages.servers.credentials.certificates import ServerTls, create_credentials
from rlhfspec.messages.servers.nats import NatsServer, User
from rlhfspec.messages.servers.redis import RedisServer
from rlhfspec.messages.transport.clock import SystemClock
from rlhfspec.runs.folder.run_folder import RunFolder
from rlhfspec.runs.live.live import LiveState, LiveView, Window
from rlhfspec.runs.live.run_state import KnownRun
from rlhfspec.stage.bus import Bus
from rlhfspec.stage.tasks import ended
from rlhfspec.telemetry.spans import Span

TOKEN = "a-token-of-the-tests"
UID = "3f2a"
HOSTILE = (
    "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">",
    "\x00\x07\x1b[31mred\x1b[0m \u202e txet desrever",
    "half \ud800 a character, and \udfff another",
    "x" * 3_000_000,
    '"},"id":"forged"}\u2028\u2029</pre><a href="javascript:alert(1)">click</a>',
)


def write_run(folder: Path, *, steps: int = 3, texts: Sequence[str] = ("4",), finished: bool = True) -> Path:
    with RunFolder(folder) as run:
        run.begin(example_job(steps=steps), resume=False)
        run.go_on_after(0)
        for step in range(1, steps + 1):
            samples = [example_sample(step=step, prompt=place, text=text) for place, text in enumerate(texts)]
            run.append_samples(samples, {each.id: _reward(each.id, step) for each in samples})
            run.append_step(example_step(step=step, reward=step / steps))
        write_trace(folder, "sums/1/0/0")
        if finished:
            run.finish("completed", "all steps are trained")
    return folder


def _reward(sample: str, step: int) -> Score:
    return Score(id=f"{sample}/reward", sample_id=sample, job="sums", step=step, stage="reward", values=(0.25,))


def write_trace(folder: Path, sample: str) -> None:
    (folder / "traces").mkdir(exist_ok=True)
    shared: dict[str, Any] = {"run": UID, "sample": sample, "worker": 0, "step": 1}
    waited: dict[str, Any] = {"complete": 102.0}
    spans = [
        Span(name="prompt", stage="prompts", began=100.0, ended=100.01, **shared),
        Span(name="generation", stage="generator", sent=100.01, began=100.2, ended=101.0, **shared),
        Span(name="reward", stage="reward", sent=101.0, began=101.1, ended=101.2, **shared),
        Span(name="training", stage="trainer", began=101.0, ended=103.0, attributes=waited, **shared),
    ]
    (folder / "traces" / "all-0.jsonl").write_text("".join(span.to_line() for span in spans))


@asynccontextmanager
async def served(source: JobSource, access: Access | None = None) -> AsyncIterator[tuple[Dashboard, str]]:
    dashboard = Dashboard(source, access or LaptopAccess(TOKEN))
    server = TestServer(dashboard.app(), host="127.0.0.1")
    await server.start_server(access_log=None, shutdown_timeout=0.1)
    try:
        yield dashboard, f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()


@asynccontextmanager
async def visited(
    run: Path, access: Access | None = None, token: str = TOKEN
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async with served(LaptopSource([run]), access) as (_, url), visiting(token) as session:
        yield session, url


def visiting(token: str = TOKEN) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"} if token else {})


@dataclass(frozen=True)
class Told:
    name: str
    data: Any
    id: str


class Stream:
    def __init__(self, session: aiohttp.ClientSession, url: str, *, last_id: str = "") -> None:
        headers = {"Last-Event-ID": last_id} if last_id else {}
        self._asked = session.get(url, headers=headers, timeout=aiohttp.ClientTimeout(total=None))

    async def __aenter__(self) -> Self:
        self._answer = await self._asked.__aenter__()
        assert self._answer.status == 200, await self._answer.text()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._answer.close()

    async def next(self, *names: str) -> Told:
        async with asyncio.timeout(60.0):
            while (told := await self._next()).name not in (names or told.name):
                pass
        return told

    async def _next(self) -> Told:
        fields: dict[str, str] = {}
        async for raw in self._answer.content:
            line = raw.decode().rstrip("\n")
            if not line and "data" in fields:
                return Told(fields["event"], json.loads(fields["data"]), fields["id"])
            name, _, value = line.partition(": ")
            fields[name] = value
        raise AssertionError("the stream ended")

    async def is_over(self) -> bool:
        try:
            return await self._answer.content.readline() == b""
        except aiohttp.ClientPayloadError:
            return True


def load(worker: int = 0, *, running: int = 3, at: int = 0, owned: tuple[str, ...] = ()) -> Load:
    return Load(
        id=f"sums/load/{worker}/{at}", job="sums", generator=f"generator-{worker}", worker=worker, step=4,
        num_running=running, num_waiting=1, num_finished=at, num_tokens=100 * at, tokens_per_second=1000.0 + worker,
        accepted_per_verification=0.5, strategy="suffix-d4-w1-b2", weights_version=3, host="node-a",
        sample_ids=owned, num_generated=(1,) * len(owned), num_held=(1,) * len(owned),
    )  # fmt: skip


def moved(number: int) -> Moved:
    return Moved(
        id=f"sums/move/{number}", job="sums", sample_id=f"sums/4/0/{number}", source=0, destination=1, how="kv",
        num_bytes=120_000, num_tokens=40, pause_seconds=0.02,
    )  # fmt: skip


def report(step: int) -> StepReport:
    return StepReport(id=f"sums/{step}/report", job="sums", metrics=example_step(step=step, reward=0.75))


def beat(worker: int = 0) -> Heartbeat:
    return Heartbeat(
        id=f"sums/beat/{worker}", job="sums", stage="reward", worker=worker, doing="working",
        what="reward of sums/4/0/0", since_seconds=1.0, overdue_seconds=-9.0, busy_seconds=12.0,
    )  # fmt: skip


def snapshot(worker: int = 0, *, owned: tuple[str, ...] = (), what: str = "64 samples") -> tuple[Record, ...]:
    ready = WorkerInfo(
        id="w", job="sums", stage="generator", worker=worker, host="node-a", pid=4711, grpc_address="", http_address=""
    )
    return ready, replace(beat(worker), stage="generator", what=what, busy_seconds=7.0), load(worker, owned=owned)


class LiveRun:
    def __init__(self, folder: Path) -> None:
        self._place = (folder / "processes").absolute()
        self._folder = folder.absolute()

    async def __aenter__(self) -> Self:
        place, credentials = self._place, self._place / "credentials"
        place.mkdir()
        keys = create_credentials(credentials, BUS_ROLES)
        rights = {role: asdict(rights_of(role, "sums", UID, declares=True)) for role in keys}
        users = {role: User(public_key=key, **rights[role]) for role, key in keys.items()}
        self._nats = NatsServer(place / "nats", run=UID, users=users, tls=ServerTls.of(credentials, "nats"))
        self._sockets = TemporaryDirectory(prefix="rlhfspec-")  # pytest's folders may be too long for one
        self._redis = RedisServer(
            place / "redis", run=UID, socket_folder=Path(self._sockets.name),
            password_file=credentials / "redis.password",
        )  # fmt: skip
        await self._nats.start()
        await self._redis.start()
        (place / "job.json").write_text(example_job().model_dump_json(by_alias=True))
        self.connections = Connections(
            uid=UID, job_file=place / "job.json", base_folder=self._folder, folder=self._folder,
            nats_url=self._nats.url, redis_url=self._redis.url, credentials=credentials, weights_folder=place,
        )  # fmt: skip
        await self._open(credentials)
        (place / "connections.json").write_text(self.connections.model_dump_json())
        return self

    async def _open(self, credentials: Path) -> None:
        roles = (CONTROL, "generator", "trainer", "reward")
        self._transports = [await connect(self.connections, role, name=role) for role in roles]
        workers = {stage.name: 1 for stage in loop.STAGES}
        bus = await Bus.open(self._transports[0], "sums", uid=UID, workers=workers)
        self._buses = [bus, *(Bus(each, "sums", uid=UID, workers=workers) for each in self._transports[1:])]
        self._known, self._window = KnownRun(SystemClock()), Window()
        self._live = LiveState(self._redis.url, UID, credentials=credentials)
        self._sending = asyncio.create_task(self._live.run())

    async def __aexit__(self, *_: object) -> None:
        (self._place / "connections.json").unlink()
        await ended(self._sending)
        await self._live.close()
        for transport in self._transports:
            await transport.close()
        await self._nats.stop()
        await self._redis.stop()
        self._sockets.cleanup()

    async def say(self, *records: Record) -> None:
        speakers = {Load: 1, Moved: 1, StepReport: 2, EvaluationReport: 2, Heartbeat: 3}
        for record in records:
            await self._buses[speakers[type(record)]].publish(record)
        self.show(*records)

    def show(self, *records: Record, window: Window | None = None) -> None:
        self._known.tell(*records)
        self._window = window or self._window
        self._live.write(LiveView(run=self._known.run, window=self._window, now=self._known.clock.now()))


def many_snapshots(count: int, owned: int) -> list[Record]:
    each = owned // count
    return [
        record
        for worker in range(count)
        for record in snapshot(worker, owned=tuple(f"sums/4/{worker}/{place}" for place in range(each)))
    ]
