"""Live state of a run in Redis: worker activity, samples and the view's last lines.

One process writes the whole state with every beat, so an emptied Redis is complete one beat later. No process waits for
Redis, and no token, curve or outcome depends on it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rlhfspec.errors import ServerFailed
from rlhfspec.runs.live.redis_client import client_of, close, failures, words_of
from rlhfspec.runs.live.redis_users import live_key
from rlhfspec.runs.live.run_state import GONE_SECONDS, KnownRun, RunState, RunWorker, without_gone
from rlhfspec.stage.base import Service
from rlhfspec.stage.pace import LIVE_BEAT_SECONDS, Beats
from rlhfspec.stage.tasks import ended, to_the_end
from rlhfspec.stage.vitals import Vitals

DEADLINE_SECONDS = 0.5  # of one write, which takes megabytes with thousands of workers
CONNECT_SECONDS = 2.0  # of a write that connects first, by TLS in a busy process
_LIVE_READ_SECONDS = 2.0
_DELETE_SECONDS = 0.2
_KEPT_MILLISECONDS = int(GONE_SECONDS * 1000)
MOST_STEPS, _MOST_SAMPLES, _MOST_CHARACTERS = 100, 50, 200

log = logging.getLogger("rlhfspec.stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleHead:
    id: str
    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    steps: tuple[str, ...] = ()
    samples: tuple[SampleHead, ...] = ()


class RecentLines:
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
    return text[:_MOST_CHARACTERS].encode(errors="replace").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """Content of a live view, with times of a clock that now reads `now`."""

    run: RunState = field(default_factory=RunState)
    window: Window = field(default_factory=Window)
    now: float = 0.0


# Format in Redis: the writer's clock, the workers and the window, without fields that no viewer uses.
_WRITTEN = TypeAdapter(tuple[float, tuple[RunWorker, ...], Window], config=ConfigDict(ser_json_inf_nan="constants"))
_NOT_WRITTEN: Any = {1: {"__all__": {"load": {"num_generated", "num_held"}, "info": {"models"}}}}


class LiveState:
    """Writer of the live state: `write` never waits or raises, `run` sends in the background."""

    def __init__(self, url: str, uid: str, *, credentials: Path | None = None) -> None:
        self.num_failures = 0  # total writes that did not arrive
        self._num_connects = 0
        self._redis = client_of(url, credentials, CONNECT_SECONDS, connected=self._connected)
        self._key = live_key(uid)
        self._unsent: bytes | None = None
        self._has_written = False
        self._news = asyncio.Event()
        self._is_away = False

    @property
    def num_reconnects(self) -> int:
        return max(self._num_connects - 1, 0)

    async def _connected(self, connection: Any) -> None:
        await connection.on_connect()
        self._num_connects += 1

    def write(self, view: LiveView) -> None:
        run = without_gone(view.run, now=view.now)
        written = (view.now, tuple(run.workers.values()), view.window)
        self._unsent = _WRITTEN.dump_json(written, exclude=_NOT_WRITTEN)
        self._news.set()

    async def run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            sending, self._unsent = self._unsent, None
            if sending is None:
                continue
            try:
                await self._send(sending)
            except failures() as error:
                self._unsent = self._unsent or sending
                self._failed(error)
                await asyncio.sleep(LIVE_BEAT_SECONDS * random.uniform(0.4, 0.8))  # jitter against a stampede
                self._news.set()
            else:
                self._arrived()

    async def _send(self, value: bytes) -> None:
        has_to_connect = self._is_away or not self._num_connects
        async with asyncio.timeout(CONNECT_SECONDS if has_to_connect else DEADLINE_SECONDS):
            await self._redis.set(self._key, value, px=_KEPT_MILLISECONDS)
        self._has_written = True

    def _failed(self, error: Exception) -> None:
        self.num_failures += 1
        if not self._is_away:
            self._is_away = True
            log.warning("redis: %s; the live view is out of date until it is back", words_of(error))

    def _arrived(self) -> None:
        if self._is_away:
            self._is_away = False
            log.info("redis: is back; %d writes did not arrive so far", self.num_failures)

    async def close(self) -> None:
        """Delete the live state if Redis answers at once, and close the client."""
        if self._has_written and not self._is_away:
            with suppress(*failures()):
                async with asyncio.timeout(_DELETE_SECONDS):
                    await self._redis.delete(self._key)
        await close(self._redis)


def _without_times(view: LiveView) -> object:
    """Return the view without times and idle generators' loads, equal until there is news."""
    workers = view.run.workers.values()
    states = [worker.state and worker.state.without_times() for worker in workers]
    return states, [each.load for each in workers if each.load and each.load.num_running], view.window


class LiveBeats(Service):
    """Service that writes the run's live state to Redis.

    consumes: the run's state; produces: its live state; waits for: the next beat (write); unblocked by: time.
    """

    def __init__(self, live: LiveState, vitals: Vitals, known: KnownRun, recent: RecentLines) -> None:
        super().__init__("live", 0, vitals)
        self._all = vitals
        self._live, self._known, self._recent = live, known, recent

    async def run(self) -> None:
        sending, beats = asyncio.create_task(self._live.run()), Beats(self._all)
        try:
            while not self.stopping.is_set():
                now = LiveView(run=self._known.run, window=self._recent.now(), now=self._known.clock.now())
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


async def read_live(url: str, uid: str, *, credentials: Path | None = None, now: float = 0.0) -> LiveView:
    """Return the live state, its times converted to a clock that reads `now`, or raise ServerFailed."""
    redis = client_of(url, credentials, _LIVE_READ_SECONDS)
    try:
        async with asyncio.timeout(_LIVE_READ_SECONDS), redis.pipeline(transaction=False) as pipeline:
            pipeline.get(live_key(uid))
            pipeline.pttl(live_key(uid))
            value, milliseconds_left = await pipeline.execute()
    except failures() as error:
        raise ServerFailed("redis", words_of(error)) from None
    finally:
        await close(redis)
    try:
        written = None if value is None else _WRITTEN.validate_json(value)
    except ValidationError:  # from another version of this program
        written = None
    if written is None:
        return LiveView(now=now)
    written_at, workers, window = written
    passed = max(GONE_SECONDS - milliseconds_left / 1000, 0.0)
    ours = (worker.later(now - passed - written_at) for worker in workers)
    return LiveView(run=RunState(workers={each.key: each for each in ours}), window=window, now=now)
