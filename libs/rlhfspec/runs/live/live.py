"""What may be lost, in Redis: what every worker does right now, which samples it has, and the view's last lines.

Each process writes its own snapshot whole with every beat, so a Redis that comes back empty is full again a beat later.
Nobody waits for Redis: the newest snapshot replaces the one that could not be sent yet, and when Redis is away or slow
one line of the log says so. Nothing that decides a token, a curve or the fate of a run reads what is kept here.

    live = LiveState(url, uid, role="generator", credentials=folder)
    LiveBeats(live, vitals, lambda: snapshot_of(service.vitals))            # a service beside the heartbeats
    view = await read_live(url, uid, role="view", credentials=folder)

Example:
    >>> window = RecentLines()
    >>> window.step('{"step": 1}')
    >>> window.sample("sums/1/0/0", "2+2=", "4" * 1000)
    >>> len(window.now().samples[0].text), window.now().steps
    (200, ('{"step": 1}',))
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from rlhfspec.errors import ServerFailed
from rlhfspec.messages.records import Load
from rlhfspec.runs.live.redis_client import client_of, close, failures, words_of
from rlhfspec.runs.live.redis_users import window_key, worker_key, worker_keys, workers_key
from rlhfspec.stage.base import Service
from rlhfspec.stage.pace import LIVE_BEAT_SECONDS, Beats
from rlhfspec.stage.tasks import ended, to_the_end
from rlhfspec.stage.vitals import Vitals, WorkerState, WorkerVitals

if TYPE_CHECKING:
    from redis.asyncio import Redis

DEADLINE_SECONDS = 0.2  # of one write
CONNECT_SECONDS = 2.0  # of one that has to connect first: by TLS, in a process that computes
_READ_SECONDS = 2.0
_KEPT_SECONDS = 30.0  # of a worker that says nothing any more
_KEPT_MILLISECONDS = int(_KEPT_SECONDS * 1000)
MOST_STEPS, _MOST_SAMPLES, _MOST_CHARACTERS = 100, 50, 200

log = logging.getLogger("rlhfspec.stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """One worker, now. `load` and `owned`, the ids of samples that it makes: of generators alone."""

    host: str
    pid: int
    state: WorkerState
    load: Load | None = None
    owned: tuple[str, ...] = ()

    @property
    def worker(self) -> str:
        return f"{self.state.stage}-{self.state.worker}"


def snapshot_of(worker: WorkerVitals, load: Load | None = None, owned: Iterable[str] = ()) -> WorkerSnapshot:
    """Of a worker of this process."""
    return WorkerSnapshot(
        host=socket.gethostname(), pid=os.getpid(), state=worker.state(), load=load, owned=tuple(owned)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleHead:
    id: str
    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What a view shows of the last moments, the newest last. `steps`: lines of steps.jsonl."""

    steps: tuple[str, ...] = ()
    samples: tuple[SampleHead, ...] = ()


class RecentLines:
    """Makes the window: keeps the last ones, and of texts the beginning."""

    def __init__(self) -> None:
        self._steps: deque[str] = deque(maxlen=MOST_STEPS)
        self._samples: deque[SampleHead] = deque(maxlen=_MOST_SAMPLES)

    def step(self, line: str) -> None:
        self._steps.append(line)

    def sample(self, sample_id: str, prompt: str, text: str) -> None:
        self._samples.append(SampleHead(id=sample_id, prompt=_head(prompt), text=_head(text)))

    def now(self) -> Window:
        return Window(steps=tuple(self._steps), samples=tuple(self._samples))


def _head(text: str) -> str:
    """Half characters cannot be written; who looks does not miss them."""
    return text[:_MOST_CHARACTERS].encode(errors="replace").decode()


_SNAPSHOT = TypeAdapter(WorkerSnapshot)
_WINDOW = TypeAdapter(Window)


class LiveState:
    """The writing side. `write` never waits and never raises; `run` sends in the background until it is cancelled."""

    def __init__(self, url: str, uid: str, *, role: str, credentials: Path | None = None) -> None:
        self.num_failures = 0  # writes that did not arrive, in all
        self._num_connects = 0
        self._uid = uid
        self._redis = client_of(url, role, credentials, CONNECT_SECONDS, connected=self._connected)
        self._unsent: dict[str, bytes] = {}
        self._written: set[str] = set()
        self._workers: set[str] = set()  # of which it tells
        self._news = asyncio.Event()
        self._is_away = False

    @property
    def num_reconnects(self) -> int:
        """How often the connection was lost, or too slow, and there is another one."""
        return max(self._num_connects - 1, 0)

    async def _connected(self, connection: Any) -> None:
        await connection.on_connect()
        self._num_connects += 1

    def write(self, what: WorkerSnapshot | Window) -> None:
        """It replaces what was written before, sent or not."""
        key = worker_key(self._uid, what.worker) if isinstance(what, WorkerSnapshot) else window_key(self._uid)
        if isinstance(what, WorkerSnapshot):
            self._workers.add(what.worker)
        self._unsent[key] = json.dumps(asdict(what)).encode()
        self._news.set()

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            sending, self._unsent = self._unsent, {}
            try:
                await self._send(sending)
            except failures() as error:
                self._unsent = sending | self._unsent
                self._failed(error)
                await asyncio.sleep(LIVE_BEAT_SECONDS * random.uniform(0.4, 0.8))  # not all processes at once
                self._news.set()
            else:
                self._arrived()

    async def _send(self, values: Mapping[str, bytes]) -> None:
        has_to_connect = self._is_away or not self._num_connects
        seconds = CONNECT_SECONDS if has_to_connect else DEADLINE_SECONDS
        async with asyncio.timeout(seconds), self._redis.pipeline(transaction=False) as pipeline:
            for key, value in values.items():
                pipeline.set(key, value, px=_KEPT_MILLISECONDS)
            if self._workers:
                pipeline.sadd(workers_key(self._uid), *self._workers)
                pipeline.pexpire(workers_key(self._uid), _KEPT_MILLISECONDS)
            await pipeline.execute()
        self._written |= values.keys()

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        if not self._is_away:
            self._is_away = True
            log.warning("redis: %s; the live view is out of date until it is back", words_of(error))

    def _arrived(self) -> None:
        if self._is_away:
            self._is_away = False
            log.info("redis: is back, after %d writes in all that did not arrive", self.num_failures)

    async def close(self) -> None:
        """Takes back what it wrote, if that can be done at once: who left is not shown any longer."""
        if self._written and not self._is_away:
            with suppress(*failures()):
                async with asyncio.timeout(DEADLINE_SECONDS):
                    await self._redis.delete(*self._written)
        await close(self._redis)


def _without_times(what: WorkerSnapshot | Window) -> WorkerSnapshot | Window:
    """That a generator still has nothing to do is no news either."""
    if isinstance(what, Window):
        return what
    is_idle = what.load is None or not what.load.num_running
    return replace(what, state=what.state.without_times(), load=None if is_idle else what.load)


class LiveBeats(Service):
    """consumes: what this process knows of itself; produces: its snapshot, or the view's window, in Redis; waits for:
    the next beat; unblocked by: time."""

    def __init__(self, live: LiveState, vitals: Vitals, look: Callable[[], WorkerSnapshot | Window]) -> None:
        super().__init__("live", 0, vitals)
        self._all = vitals
        self._live = live
        self._look = look

    async def run(self) -> None:
        sending, beats = asyncio.create_task(self._live.run()), Beats(self._all)
        try:
            while not self.stopping.is_set():
                now = self._look()
                self._live.write(now)
                with self.vitals.waiting("the next beat"):
                    await beats.next(_without_times(now), self.stopping)
        finally:
            await to_the_end(self._over(sending))

    async def _over(self, sending: asyncio.Task[None]) -> None:
        await ended(sending)
        await self._live.close()
        if not sending.cancelled():
            sending.result()


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """`silent_seconds`: by worker, since its last beat. `owners`: by sample id, the worker that makes it."""

    workers: Mapping[str, WorkerSnapshot]
    silent_seconds: Mapping[str, float]
    window: Window

    @property
    def loads(self) -> dict[str, Load]:
        return {name: each.load for name, each in self.workers.items() if each.load is not None}

    @property
    def owners(self) -> dict[str, str]:
        """Of two that claim a sample, the one that spoke last."""
        by_silence = sorted(self.workers, key=self.silent_seconds.__getitem__, reverse=True)
        return {sample: name for name in by_silence for sample in self.workers[name].owned}


async def read_live(url: str, uid: str, *, role: str, credentials: Path | None = None) -> LiveView:
    """All there is now; ServerFailed with the reason when Redis cannot be asked."""
    redis = client_of(url, role, credentials, _READ_SECONDS)
    try:
        async with asyncio.timeout(_READ_SECONDS):
            return await _read(redis, uid)
    except failures() as error:
        raise ServerFailed("redis", words_of(error)) from None
    finally:
        await close(redis)


async def _read(redis: Redis, uid: str) -> LiveView:
    keys = sorted(worker_keys(uid, await redis.smembers(workers_key(uid))))
    async with redis.pipeline(transaction=False) as pipeline:
        pipeline.get(window_key(uid))
        for key in keys:
            pipeline.get(key)
            pipeline.pttl(key)
        window, *rest = await pipeline.execute()
    workers, silent = {}, {}
    for value, milliseconds_left in zip(rest[::2], rest[1::2], strict=True):
        snapshot = _parsed(_SNAPSHOT, value)
        if snapshot is not None:
            workers[snapshot.worker] = snapshot
            silent[snapshot.worker] = max(_KEPT_SECONDS - milliseconds_left / 1000, 0.0)
    return LiveView(workers=workers, silent_seconds=silent, window=_parsed(_WINDOW, window) or Window())


def _parsed(adapter: TypeAdapter[Any], value: bytes | None) -> Any:
    """None for what is gone meanwhile, and for what another version of this program wrote."""
    try:
        return None if value is None else adapter.validate_json(value)
    except ValidationError:
        return None
